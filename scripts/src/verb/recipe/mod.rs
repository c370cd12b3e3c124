//! `ocelli recipe`: the recipes that ship with the program, their keys, and new ones.

mod keys;

use std::process::ExitCode;

use textwrap::{Options, WordSplitter, wrap};
use trainer::recipe::{TemplateRequest, Templates, title};

use crate::console::page_width;
use crate::recipes::{BUILT_IN, check_settings, read_text};

/// Flags of `recipe`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// List the built-in recipes.
    List,
    /// Print a built-in recipe, with its comments.
    Show(ShowArgs),
    /// Print recipe keys with their types, units, defaults and meanings.
    Keys(keys::Args),
    /// Print a new recipe for a method, a backbone and an image size, ready to edit.
    New(NewArgs),
}

/// Flags of `recipe show`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli recipe show dino_cifar")]
struct ShowArgs {
    /// Recipe name or file.
    name: String,
}

/// Flags of `recipe new`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli recipe new --method dino --arch vit --image-px 64 --width 192\n  \
        ocelli recipe new --method swav --arch resnet --image-px 96 --set optim.lr=0.1"
)]
struct NewArgs {
    /// Method: a method.name value.
    #[arg(long)]
    method: String,
    /// Backbone: a model.arch value [default: the built-in recipe's].
    #[arg(long)]
    arch: Option<String>,
    /// Input image size of the backbone, in pixels.
    #[arg(long, default_value_t = 224)]
    image_px: u32,
    /// Width of the backbone, model.width.
    #[arg(long)]
    width: Option<usize>,
    /// Name of the recipe.
    #[arg(long, default_value = "mine")]
    name: String,
    /// Override a recipe value. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::List => list(),
        Verb::Show(args) => out!("{}", read_text(&args.name)?.trim_end()),
        Verb::Keys(args) => keys::run(args)?,
        Verb::New(args) => {
            let request = TemplateRequest {
                method: &args.method,
                arch: args.arch.as_deref(),
                image_px: args.image_px,
                width: args.width,
                name: &args.name,
                overrides: &args.overrides,
            };
            check_settings(&args.overrides, &args.name, "")?;
            out!("{}", Templates::new(BUILT_IN)?.write(&request)?.trim_end());
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the recipes that ship with the program.
fn list() {
    let longest = BUILT_IN.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let indent = " ".repeat(longest + 2);
    for (name, text) in BUILT_IN {
        let head = format!("{name:longest$}  ");
        let options = Options::new(page_width(140))
            .word_splitter(WordSplitter::NoHyphenation)
            .initial_indent(&head)
            .subsequent_indent(&indent);
        for line in wrap(&title(text), options) {
            out!("{line}");
        }
    }
}
