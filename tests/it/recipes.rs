//! Recipes, compared with the published ones, and their headers.

use std::collections::BTreeMap;

use networks::ModelConfig;
use session::{SessionError, open_frozen};
use toml::{Table, Value};
use trainer::Recipe;
use trainer::recipe::{TemplateRequest, Templates, keys, title};

use crate::messages::check_message;
use crate::support::{World, fails, ok};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/recipes");

/// Reads the names and texts of all recipes.
fn recipes() -> BTreeMap<String, String> {
    let mut recipes = BTreeMap::new();
    for entry in std::fs::read_dir(FOLDER).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        recipes.insert(name, std::fs::read_to_string(path).unwrap());
    }
    recipes
}

fn published() -> Table {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/published.toml");
    std::fs::read_to_string(file).unwrap().parse().unwrap()
}

/// Returns the comment at the start of a recipe, as one line.
fn header(text: &str) -> String {
    let lines =
        text.lines().take_while(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    lines.collect::<Vec<_>>().join(" ")
}

/// Returns the value at a dotted key; a number in the key is a position in a list.
fn at<'v>(value: &'v Value, key: &str) -> Option<&'v Value> {
    key.split('.').try_fold(value, |value, part| match part.parse::<usize>() {
        Ok(index) => value.get(index),
        Err(_) => value.get(part),
    })
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Integer(number) => vec![*number as f64],
        Value::Float(number) => vec![*number],
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        _ => Vec::new(),
    }
}

/// Returns `true` if two values are equal up to rounding to f32.
fn are_equal(a: &Value, b: &Value) -> bool {
    let a_numbers = numbers(a);
    let b_numbers = numbers(b);
    if a_numbers.is_empty() {
        return a == b;
    }
    a_numbers.len() == b_numbers.len()
        && a_numbers.iter().zip(&b_numbers).all(|(a, b)| (a - b).abs() <= 1e-7 * b.abs())
}

#[test]
fn recipes_have_the_published_values() {
    let recipes = recipes();
    for (name, facts) in published() {
        let n_samples = facts["n_samples"].as_integer().unwrap() as u64;
        let overrides = facts.get("overrides").and_then(Value::as_array).into_iter().flatten();
        let overrides: Vec<String> = overrides.map(|set| set.as_str().unwrap().to_string()).collect();
        let recipe = Recipe::parse(&recipes[&name], &name, &overrides).unwrap();
        let plan = trainer::resolve(recipe, n_samples).unwrap();
        let written = Value::try_from(&plan.recipe).unwrap();
        for (key, expected) in facts["keys"].as_table().unwrap() {
            let value = at(&written, key).unwrap_or_else(|| panic!("{name} has no {key}"));
            assert!(are_equal(value, expected), "{name}: {key} is {value}, published {expected}");
        }
        assert_eq!(plan.total_steps as i64, facts["steps"].as_integer().unwrap(), "{name}");
        let schedule = plan.schedules().lr;
        for pair in facts["rates"].as_array().unwrap() {
            let [step, expected] = numbers(pair).try_into().unwrap();
            let rate = schedule.at(step as u64);
            assert!(
                (rate - expected).abs() <= 2e-6 * expected,
                "{name} at step {step}: {rate}, published {expected}"
            );
        }
    }
}

#[test]
fn headers_contain_command_publication_machine_and_score() {
    let published = published();
    for (name, text) in recipes() {
        let header = header(&text);
        for field in ["command ", "published ", "machine ", "score "] {
            assert!(header.contains(field), "{name}: no {field}");
        }
        assert!(header.contains(&format!("--recipe {name} ")) || name == "quickstart", "{name}: its command");
        let is_own = header.contains("No publication has this run");
        assert_ne!(is_own, published.contains_key(&name), "{name}: tests/golden/published.toml");
        let Some(facts) = published.get(&name) else { continue };
        for words in facts["header"].as_array().unwrap() {
            assert!(header.contains(words.as_str().unwrap()), "{name}: nothing of {words}");
        }
        check_numbers(&name, &header, &text);
    }
}

/// Returns the number before the first occurrence of `unit` in a header.
fn number_before(header: &str, unit: &str) -> Option<f64> {
    let (start, _) = header.split_once(unit)?;
    start.rsplit(' ').next()?.replace([',', '('], "").parse().ok()
}

/// Checks that numbers of the header agree with the recipe.
fn check_numbers(name: &str, header: &str, text: &str) {
    let recipe = Recipe::parse(text, name, &[]).unwrap();
    if let Some(epochs) = number_before(header, " epochs") {
        let length = Value::try_from(recipe.optim.length).unwrap();
        let is_in_steps = length.get("steps").is_some();
        assert!(is_in_steps || numbers(&length["epochs"]) == [epochs], "{name}: {epochs} epochs");
    }
    let is_before_command = header.find("in batches of ") < header.find("command");
    if let Some(size) = header.split("in batches of ").nth(1)
        && is_before_command
    {
        let digits = size.chars().take_while(|c| c.is_ascii_digit() || *c == ',');
        let size: String = digits.filter(char::is_ascii_digit).collect();
        assert_eq!(size.parse::<usize>().unwrap(), recipe.optim.batch_size, "{name}: batches");
    }
    let units = [(" M parameters", 1e6), (" B parameters", 1e9)];
    for (unit, scale) in units {
        let Some(count) = number_before(header, unit) else { continue };
        let preset = format!("seer-rg{}", name.trim_start_matches("seer_regnety_"));
        let model = trainer::cost::preset(&preset, None).unwrap();
        let n_params: usize = model.trained.backbone.iter().map(|unit| unit.numel).sum();
        assert!((n_params as f64 / scale / count - 1.0).abs() < 0.03, "{name}: {n_params} parameters");
    }
}

/// Returns the backbone of the weights, for recipes that take it from them.
fn backbone_of_weights() -> ModelConfig {
    let text = r#"{"arch": "vit", "image_px": 448, "patch_px": 2, "width": 12, "depth": 4, "heads": 2}"#;
    serde_json::from_str(text).unwrap()
}

/// Each recipe has its file's name and can be run; a title fits on two lines.
#[test]
fn every_recipe_resolves() {
    for (name, text) in recipes() {
        let recipe = Recipe::parse_with_model(&text, &name, &[], |_| Ok(backbone_of_weights())).unwrap();
        assert_eq!(recipe.name, name);
        let title = title(&text);
        assert!((20..200).contains(&title.len()), "{name}: {title}");
        let mut frozen = recipe.clone();
        if !frozen.method.frozen().is_empty() {
            let error = open_frozen(&mut frozen, None).err().unwrap();
            let is_unnamed =
                matches!(&error, SessionError::FrozenUnnamed { key } if key == "method.teacher.weights");
            assert!(is_unnamed, "{name}: {error}");
            continue;
        }
        let plan = trainer::resolve(recipe, 1 << 20).unwrap();
        plan.method().unwrap();
    }
}

#[test]
fn every_recipe_fits_a_small_batch() {
    for (name, text) in recipes() {
        if text.contains("from_init") || text.contains("teacher = ") {
            // Such a recipe needs weights.
            continue;
        }
        let mut recipe = Recipe::parse(&text, &name, &[]).unwrap();
        recipe.fit_batch(8);
        trainer::resolve(recipe, 1 << 20).unwrap();
    }
}

/// Returns the words that the key `path` may be.
fn words(path: &str) -> Vec<String> {
    let key = keys().into_iter().find(|key| key.path == path).unwrap();
    key.words.into_iter().map(|(word, _)| word).collect()
}

/// Returns the request of a recipe for these.
fn request<'a>(method: &'a str, arch: &'a str, image_px: u32) -> TemplateRequest<'a> {
    TemplateRequest { method, arch: Some(arch), image_px, width: None, name: "mine", overrides: &[] }
}

/// Every method with every backbone that it works with, at several sizes, is a recipe that can be
/// run.
#[test]
fn every_pair_is_a_recipe_or_gives_a_reason() {
    let recipes = recipes();
    let texts: Vec<(&str, &str)> =
        recipes.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let templates = Templates::new(&texts).unwrap();
    for method in &words("method.name") {
        for arch in &words("model.arch") {
            for image_px in [32, 96, 224] {
                match templates.write(&request(method, arch, image_px)) {
                    Ok(text) => {
                        let recipe = Recipe::parse(&text, "mine", &[]).unwrap();
                        assert_eq!(recipe.model.image_px() as u32, image_px, "{method} {arch}");
                        assert!(text.lines().all(|line| line.len() < 400), "{text}");
                    }
                    Err(error) => {
                        let error = error.to_string();
                        // The stride of these backbones is the side of a small image.
                        let is_coarse = image_px == 32 && error.contains("told apart by their size");
                        let is_expected = error.contains("no tokens to mask") || is_coarse;
                        assert!(is_expected, "{method} {arch} {image_px}: {error}");
                    }
                }
            }
        }
    }
    let overrides = ["optim.batch_size=32", "model.drop_path=0.1"].map(String::from);
    let request = TemplateRequest { width: Some(192), overrides: &overrides, ..request("dino", "vit", 64) };
    let text = templates.write(&request).unwrap();
    for line in ["width = 192", "batch_size = 32", "drop_path = 0.1", "image_px = 64"] {
        assert!(text.lines().any(|written| written == line), "{line} in:\n{text}");
    }
}

/// Runs a command and returns standard output.
fn stdout(world: &World, args: &[&str]) -> String {
    let output = world.ocelli(args);
    ok(&output);
    String::from_utf8(output.stdout).unwrap()
}

/// Trains with `recipe` in the folder `run`.
fn pretrain(world: &World, recipe: &str, run: &str, more: &[&str]) {
    let shard = world.text("data/train-000000.tar");
    let workdir = world.text(run);
    let args = ["pretrain", "--recipe", recipe, "--shards", &shard, "--workdir", &workdir];
    ok(&world.ocelli(&[&args[..], more].concat()));
}

fn read_plan(world: &World, run: &str) -> String {
    std::fs::read_to_string(world.path(run).join("plan.toml")).unwrap()
}

/// A recipe that the program prints can be trained, and so can the plan of that run with a key set.
#[test]
fn printed_recipes_and_plans_can_be_trained() {
    let world = World::new(24);
    let new = ["recipe", "new", "--method", "dino", "--arch", "vit", "--image-px", "16", "--width", "32"];
    let small =
        ["--set", "optim.batch_size=8", "--set", "optim.length={steps=2}", "--set", "method.head_hidden=16"];
    let recipe = stdout(&world, &[&new[..], &small].concat());
    assert!(recipe.contains("\n# Channels of a token.\nwidth = 32\n"), "{recipe}");
    std::fs::write(world.path("mine.toml"), recipe).unwrap();
    pretrain(&world, &world.text("mine.toml"), "a", &[]);
    pretrain(&world, &world.text("a/plan.toml"), "b", &["--set", "seed=5"]);
    let expected = read_plan(&world, "a").replace("\nseed = 0\n", "\nseed = 5\n");
    assert_eq!(read_plan(&world, "b"), expected);

    let recipe = stdout(&world, &["recipe", "show", "dino_cifar"]);
    assert_eq!(recipe.trim_end(), recipes()["dino_cifar"].trim_end());
    let list = stdout(&world, &["recipe", "list"]);
    assert_eq!(list.lines().filter(|line| !line.starts_with(' ')).count(), recipes().len());
    let keys = stdout(&world, &["recipe", "keys", "optim.clip"]);
    assert!(keys.contains("optim.clip_norm  number") && !keys.contains("optim.lr"), "{keys}");
    // The two ways to state the size of views name each other.
    let keys = stdout(&world, &["recipe", "keys", "views.global_px"]);
    assert!(keys.contains("views.crops.0.size_px"), "{keys}");
    let keys = stdout(&world, &["recipe", "keys", "views.crops"]);
    assert!(keys.contains("views.global_px"), "{keys}");
    let output = world.ocelli(&["recipe", "keys", "optim.warmpu"]);
    check_message("recipes::printed_recipes_and_plans_can_be_trained.key", &fails(&output, 2));
    let output = world.ocelli(&["recipe", "new", "--method", "dion"]);
    check_message("recipes::printed_recipes_and_plans_can_be_trained.method", &fails(&output, 2));
    let output = world.ocelli(&["recipe", "new", "--method", "dinov2", "--arch", "resnet"]);
    check_message("recipes::printed_recipes_and_plans_can_be_trained.backbone", &fails(&output, 2));
}
