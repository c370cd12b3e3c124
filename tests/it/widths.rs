//! Output at the widths of terminals: sentences end between words and tables are divided. A pipe
//! has no width, and a line for each sentence.

use crate::support::{World, ok, program};

/// Widths of terminals, in characters.
const WIDTHS: [usize; 2] = [60, 80];

/// Runs the program with `args` in a terminal of `width` columns; returns its standard output.
fn output_at(width: usize, args: &[&str]) -> String {
    let output = program().args(args).env("COLUMNS", width.to_string()).output().unwrap();
    ok(&output);
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the program with `args`; returns its standard output, which has no width.
fn output_of(args: &[&str]) -> String {
    let output = program().args(args).output().unwrap();
    ok(&output);
    String::from_utf8(output.stdout).unwrap()
}

/// Checks that no line of `text` is wider than `width`. A word, such as a path, is not divided.
fn check_width(text: &str, width: usize) {
    for line in text.lines() {
        let is_word = line.split_whitespace().count() == 1;
        assert!(is_word || line.chars().count() <= width, "wider than {width}: {line}\n{text}");
    }
}

/// Returns the words of `text` with a space between two.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the number of lines of `text` that begin with `beginning`.
fn n_lines(text: &str, beginning: &str) -> usize {
    text.lines().filter(|line| line.starts_with(beginning)).count()
}

#[test]
fn a_plan_has_the_width_of_the_terminal() {
    let args =
        ["plan", "--recipe", "dino_vits16", "--gpu", "a100-40", "--ranks", "1", "8", "64", "--details"];
    let whole = output_of(&args);
    // The heading of the table, and that of its details.
    assert_eq!(n_lines(&whole, "ranks mode"), 2, "{whole}");
    assert!(whole.contains("\n  1 rank: one failure every ") && whole.contains("\n  64 ranks: "), "{whole}");
    assert!(whole.contains("\n250,228 steps of 512 images\n"), "{whole}");
    let sentences: Vec<&str> = whole.lines().filter(|line| line.contains("; ")).collect();
    assert!(sentences.iter().filter(|line| line.chars().count() > 80).count() > 5, "{whole}");
    for width in WIDTHS {
        let text = output_at(width, &args);
        check_width(&text, width);
        let text_words = words(&text);
        for sentence in &sentences {
            assert!(text_words.contains(&words(sentence)), "{sentence}\n{text}");
        }
    }
    // Both tables are divided, and the columns of ranks and mode are in each part.
    assert_eq!(n_lines(&output_at(60, &args), "ranks mode"), 4);
    // What programs read is one line.
    let args = [&args[..], &["--json"]].concat();
    let text = output_at(60, &args);
    let json: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert!(json["rows"].is_array());
}

#[test]
fn findings_of_the_doctor_have_the_width_of_the_terminal() {
    for width in WIDTHS {
        let text = output_at(width, &["doctor"]);
        check_width(&text, width);
        assert_eq!(n_lines(&text, "launcher       none: a single process"), 1, "{text}");
    }
}

#[test]
fn recipes_and_keys_have_the_width_of_the_terminal() {
    for width in WIDTHS {
        for args in [&["recipe", "list"][..], &["recipe", "keys"]] {
            check_width(&output_at(width, args), width);
        }
    }
}

#[test]
fn lists_of_runs_have_the_width_of_the_terminal() {
    let world = World::new(40);
    ok(&world.pretrain("runs/first", &["--set", "optim.length={steps=4}"]));
    ok(&world.pretrain("runs/second", &["--set", "optim.length={steps=4}", "--set", "seed=4"]));
    let shard = world.text("data/train-000000.tar");
    for run in [world.text("runs/first"), world.text("runs/second")] {
        let sets = ["--train", &shard, "--test", &shard, "--protocol", "knn"];
        ok(&world.ocelli(&[&["probe", "--checkpoint", &run], &sets[..]].concat()));
    }
    let runs = world.text("runs");
    let whole = output_of(&["runs", &runs]);
    assert_eq!(n_lines(&whole, "run "), 1, "{whole}");
    let heading = whole.lines().next().unwrap();
    for width in WIDTHS {
        let text = output_at(width, &["runs", &runs]);
        check_width(&text, width);
        // Each part of the table begins with the names of the runs, and no column is left out.
        assert!(n_lines(&text, "run ") > 1, "{text}");
        assert_eq!(n_lines(&text, "first "), n_lines(&text, "run "), "{text}");
        for column in heading.split("  ").filter(|column| !column.is_empty()) {
            assert!(text.contains(column.trim()), "no column {column}:\n{text}");
        }
        check_width(&output_at(width, &["runs", &runs, "--table"]), width);
    }
}
