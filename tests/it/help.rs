//! Help of all commands: what `-h` shows fits a terminal of 80 × 40 characters, and the options that
//! all commands have are on a page of their own.

use crate::support::{World, ok, program};

/// Size of the terminal.
const WIDTH: usize = 80;
const HEIGHT: usize = 40;

/// Options of all commands.
const COMMON: [&str; 8] = [
    "--cache <",
    "--cache-gb <",
    "--image-column <",
    "--label-column <",
    "--quiet",
    "--verbose",
    "--log-format <",
    "--log-every <",
];

/// Runs the program with `args` in a terminal of 80 columns; returns its standard output.
fn output(args: &[&str]) -> String {
    output_at(WIDTH, args)
}

/// Runs the program with `args` in a terminal of `width` columns; returns its standard output.
fn output_at(width: usize, args: &[&str]) -> String {
    let output = program().args(args).env("COLUMNS", width.to_string()).output().unwrap();
    ok(&output);
    // A usage begins with the name of the program's file.
    String::from_utf8(output.stdout).unwrap().replace("ocelli-under-test", "ocelli")
}

/// Prints the help of the command `words` by `flag`.
fn help(words: &[String], flag: &str) -> String {
    let mut args: Vec<&str> = words.iter().map(String::as_str).collect();
    args.push(flag);
    output(&args)
}

/// Names of the subcommands that a help lists.
fn subcommands(help: &str) -> Vec<String> {
    let mut names = Vec::new();
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    for line in lines.take_while(|line| !line.is_empty()) {
        // A description that takes several lines is indented further.
        let name = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' '));
        let name = name.and_then(|rest| rest.split_whitespace().next());
        names.extend(name.filter(|name| *name != "help").map(str::to_string));
    }
    names
}

/// All commands with their subcommands, the program itself first.
fn commands() -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut at = 0;
    while at < commands.len() {
        for name in subcommands(&help(&commands[at], "-h")) {
            let mut command = commands[at].clone();
            command.push(name);
            commands.push(command);
        }
        at += 1;
    }
    commands
}

#[test]
fn short_help_fits_a_screen() {
    let commands = commands();
    assert!(commands.len() > 45, "{commands:?}");
    for command in commands {
        let name = command.join(" ");
        let text = help(&command, "-h");
        let n_lines = text.lines().count();
        assert!(n_lines <= HEIGHT, "`ocelli {name} -h` has {n_lines} lines:\n{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "`ocelli {name} -h` has a wider line:\n{line}");
        }
        for flag in ["-h", "--help"] {
            let text = help(&command, flag);
            assert!(text.trim_end().ends_with("`ocelli help options`"), "ocelli {name} {flag}:\n{text}");
            for option in COMMON {
                assert!(!text.contains(option), "ocelli {name} {flag} shows {option}");
            }
        }
    }
}

/// In a narrow terminal, everything but the line of the usage is divided between words.
#[test]
fn short_help_fits_a_narrow_terminal() {
    const NARROW: usize = 60;
    for command in commands() {
        let mut args: Vec<&str> = command.iter().map(String::as_str).collect();
        args.push("-h");
        for line in output_at(NARROW, &args).lines().filter(|line| !line.starts_with("Usage: ")) {
            let name = command.join(" ");
            assert!(line.chars().count() <= NARROW, "`ocelli {name} -h` has a wider line:\n{line}");
        }
    }
}

#[test]
fn long_help_shows_what_short_help_leaves_out() {
    let pretrain = ["pretrain".to_string()];
    let short = help(&pretrain, "-h");
    let long = help(&pretrain, "--help");
    for option in ["--inject-fault <", "--norm-epsilon <", "--lengthen"] {
        assert!(!short.contains(option), "{short}");
        assert!(long.contains(option), "{long}");
    }
    // Of each option, the short help has the first sentence.
    assert!(short.contains("Override a recipe value") && !short.contains("Can be repeated"), "{short}");
    assert!(long.contains("Can be repeated"), "{long}");
    assert!(short.contains("see more with '--help'"), "{short}");
}

#[test]
fn options_of_all_commands_have_a_page() {
    let page = output(&["help", "options"]);
    for option in COMMON {
        assert_eq!(page.matches(option).count(), 1, "{option}:\n{page}");
    }
    assert!(page.lines().all(|line| line.chars().count() <= WIDTH), "{page}");
    assert_eq!(output(&["options"]).trim_end(), page.trim_end());
    // They are options of every command, before and after its own.
    let world = World::new(1);
    let shard = world.text("data/train-000000.tar");
    for args in [["--quiet", "shards", "verify", &shard], ["shards", "verify", &shard, "--quiet"]] {
        assert_eq!(ok(&world.ocelli(&args)), "");
    }
}

/// Manual pages explain every option, also those that `-h` hides.
#[test]
fn manual_pages_explain_all_options() {
    let world = World::new(1);
    ok(&world.ocelli(&["man", "--out", &world.text("man")]));
    let first = std::fs::read_to_string(world.path("man/ocelli.1")).unwrap();
    assert!(first.contains("Print only warnings and errors"), "{first}");
    let pretrain = std::fs::read_to_string(world.path("man/ocelli-pretrain.1")).unwrap();
    for text in ["Epsilon of the layer norms", "Inject a fault", "Print only warnings and errors"] {
        assert!(pretrain.contains(text), "{text}:\n{pretrain}");
    }
}
