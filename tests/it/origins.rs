//! Model cards: the weights that a network began with, and their licenses.

use crate::support::{World, ok};

/// Exports `checkpoint` to the file or folder `out` with more flags; returns the text of the card.
fn card(world: &World, checkpoint: &str, out: &str, more: &[&str]) -> String {
    let out = world.path(out);
    let path = out.display().to_string();
    ok(&world.ocelli(&[&["export", "--checkpoint", checkpoint, "--out", &path], more].concat()));
    let card = if out.is_dir() { out.join("README.md") } else { format!("{path}.md").into() };
    std::fs::read_to_string(card).unwrap()
}

/// Returns the rows of the table of origins in a card, each without its fingerprint, which must be
/// one.
fn origins(card: &str) -> Vec<String> {
    let mut rows = Vec::new();
    let Some((_, table)) = card.split_once("| weights | made by |") else { return rows };
    for line in table.lines().skip(2).take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, library, fingerprint, license] = cells[..] else { panic!("{line}") };
        let is_hash = fingerprint.len() == 16 && fingerprint.chars().all(|c| c.is_ascii_hexdigit());
        assert!(is_hash, "{line}");
        rows.push(format!("{name}, {library}, {license}"));
    }
    rows
}

#[test]
fn cards_name_the_weights_that_a_run_began_with() {
    let world = World::new(24);
    ok(&world.pretrain("first", &["--set", "optim.length={steps=4}"]));
    let first = world.text("first");
    let text = card(&world, &first, "first.safetensors", &[]);
    assert_eq!(origins(&text), [""; 0]);
    assert!(text.contains("Origin: random weights."), "{text}");

    // Weights of another library, whose license is in the model card beside them.
    card(&world, &first, "timm", &["--format", "timm"]);
    let header = "---\nlicense: apache-2.0\n---\n";
    std::fs::write(world.path("timm/README.md"), header).unwrap();
    let weights = world.text("timm");
    let init = ["--init", &weights, "--set", "optim.length={steps=4}"];
    ok(&world.pretrain("second", &init));
    let second = world.text("second");
    let expected = ["timm, timm, apache-2.0"];
    let text = card(&world, &second, "second.safetensors", &[]);
    assert_eq!(origins(&text), expected);
    assert!(text.contains("Their licenses apply"), "{text}");
    for (format, out) in [("dinov2", "second.pth"), ("onnx", "second.onnx"), ("transformers", "hf")] {
        assert_eq!(origins(&card(&world, &second, out, &["--format", format])), expected, "{format}");
    }

    // The run goes on without the weights, and its plan still has their origin.
    std::fs::remove_dir_all(world.path("timm")).unwrap();
    let longer = ["--init", &weights, "--lengthen", "--set", "optim.length={steps=8}"];
    ok(&world.pretrain("second", &longer));
    assert_eq!(origins(&card(&world, &second, "longer.safetensors", &[])), expected);

    // A fork, and a run that begins with an exported file, began with what these began with, too.
    ok(&world.pretrain("fork", &["--fork", &second]));
    let fork = card(&world, &world.text("fork"), "fork.safetensors", &[]);
    assert_eq!(origins(&fork), ["second, step 8, ocelli, none stated", "timm, timm, apache-2.0"]);
    let file = world.text("second.safetensors");
    ok(&world.pretrain("third", &["--init", &file, "--set", "optim.length={steps=4}"]));
    let third = card(&world, &world.text("third"), "third.safetensors", &[]);
    assert_eq!(origins(&third), ["second.safetensors, ocelli, apache-2.0", "timm, timm, apache-2.0"]);
}

/// A conversion states the weights that it was made of.
#[test]
fn cards_of_converted_weights_name_their_source() {
    let world = World::new(24);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=2}"]));
    let run = world.text("run");
    card(&world, &run, "published.pth", &["--format", "dinov2"]);
    let published = world.text("published.pth");
    let text = card(&world, &published, "converted", &["--format", "timm", "--heads", "2"]);
    assert_eq!(origins(&text), ["published.pth, dinov2, unknown: see the source"]);
    let again = card(&world, &world.text("converted"), "again.safetensors", &["--heads", "2"]);
    assert_eq!(
        origins(&again),
        ["converted, timm, unknown: see the source", "published.pth, dinov2, unknown: see the source"]
    );
}
