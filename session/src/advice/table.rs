//! Candidates for a choice: built-in recipes with settings, and how many epochs each needs.
//!
//! What was measured stands in docs/methods.md and docs/continue.md, and docs/hours.md has a table
//! of it. Values that nobody has measured are constants whose names begin with `UNMEASURED`.

use pipeline::words::{counted, thousands};
use trainer::{Plan, Recipe};

/// Weights that a run is given, by the network that they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Given {
    /// None.
    Nothing,
    /// A transformer for images of fewer than [`SMALL_PX`].
    SmallTransformer,
    /// A transformer with a table of positions.
    Transformer,
    /// A transformer with rotary positions.
    RotaryTransformer,
    /// A convolutional network.
    Convolutional,
}

/// What a candidate does with the weights that are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It needs none.
    FromRandom,
    /// It continues training them.
    Continues,
    /// It distills them into a smaller network.
    Distills,
}

/// A recipe with settings.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Candidate {
    /// Name of the built-in recipe.
    pub(super) recipe: &'static str,
    /// Settings of `--set`. Lengths are in percent, so that they fit runs of any length.
    pub(super) settings: &'static [&'static str],
    /// Further settings without a GPU.
    pub(super) cpu_settings: &'static [&'static str],
    /// Weights with which it is possible.
    pub(super) given: &'static [Given],
    pub(super) role: Role,
    pub(super) needs_gpu: bool,
    /// Side of its largest views; `None` if the weights determine it.
    pub(super) view_px: Option<u32>,
    /// Fewest images for which it is chosen.
    pub(super) least_images: u64,
    /// Epochs below which it is chosen only if nothing comes nearer to its best.
    pub(super) least_epochs: f64,
    /// Epochs from which it is chosen before candidates that cost less.
    pub(super) best_epochs: f64,
    /// Why the method is chosen, after "because".
    pub(super) reason: &'static str,
    /// What is known of the number of epochs, and where it stands.
    pub(super) evidence: &'static str,
}

/// Side of the images of weights below which those are continued with small views. Measured are 32
/// px only (docs/continue.md).
pub(super) const SMALL_PX: usize = 64;

/// Ratio of the side of views to that of the images up to which images are enlarged.
const UNMEASURED_MOST_ENLARGED: f64 = 1.5;

/// Fewest images that were measured, with networks of fewer parameters than [`SMALL_PARAMS`]: in as
/// many steps, they teach as much as 3,000 (docs/small.md).
const LEAST_IMAGES: u64 = 300;

/// Fewest images of a run from random weights for networks of [`SMALL_PARAMS`] or more.
const UNMEASURED_LEAST_IMAGES: u64 = 1000;

/// The same for networks of [`LARGE_PARAMS`] or more.
const UNMEASURED_LEAST_IMAGES_LARGE: u64 = 3000;

/// Parameters between those of the network of `lejepa_cifar` and of a ViT-Ti.
const SMALL_PARAMS: usize = 2_000_000;

/// Parameters between those of a ViT-Ti and of a ViT-S.
const LARGE_PARAMS: usize = 10_000_000;

/// Fewest images of a run of DINO with a ViT-S from random weights.
const UNMEASURED_LEAST_IMAGES_DINO: u64 = 100_000;

/// Fewest images of a run that begins with weights. They were measured with those of a small
/// network.
const UNMEASURED_LEAST_IMAGES_WITH_WEIGHTS: u64 = LEAST_IMAGES;

/// Epochs of the longest published run of a candidate, `lejepa_vits8_imagenette` (its header).
pub(super) const LONGEST_PUBLISHED_EPOCHS: f64 = 800.0;

/// Epochs of `lejepa_cifar` at 32 px on 10,000 images of CIFAR-10 that score k-NN 38.8 and 39.1
/// (docs/methods.md); a random network scores 29.8.
const LEAST_EPOCHS_LEJEPA: f64 = 10.0;

/// Epochs of the same that score k-NN 45.5 and 46.7 (docs/methods.md): the longest run so far.
const BEST_EPOCHS_LEJEPA: f64 = 33.0;

/// Epochs of LeJEPA on larger images or with larger networks: a guess from those at 32 px.
const UNMEASURED_LEAST_EPOCHS_LEJEPA: f64 = LEAST_EPOCHS_LEJEPA;

/// Epochs of LeJEPA at 64 px: a guess from those at 32 px.
const UNMEASURED_BEST_EPOCHS_64_PX: f64 = BEST_EPOCHS_LEJEPA;

/// Epochs of LeJEPA with a ViT-S: a guess. The published run of `lejepa_vits8_imagenette`, on 9,469
/// images, has 800 (its header); it has not been repeated with this program, and nothing is known
/// of shorter ones.
const UNMEASURED_BEST_EPOCHS_VITS: f64 = 100.0;

/// Epochs of the published run of `dino_vits16`, on 1.28 M images (its header).
const BEST_EPOCHS_DINO: f64 = 100.0;

/// Epochs of `dino_vits16` below which it is not worth its teacher.
const UNMEASURED_LEAST_EPOCHS_DINO: f64 = 30.0;

/// Epochs of training a small transformer further that score k-NN 36.5 on CIFAR-10, as after eight
/// (docs/continue.md).
const BEST_EPOCHS_CONTINUED: f64 = 10.0;

/// Epochs of the same, 300 steps, that score k-NN 33.5, where the weights score 31.6
/// (docs/continue.md).
const LEAST_EPOCHS_CONTINUED: f64 = 2.0;

/// Epochs of training larger networks further: a guess from those of a small transformer.
const UNMEASURED_BEST_EPOCHS_CONTINUED: f64 = BEST_EPOCHS_CONTINUED;
const UNMEASURED_LEAST_EPOCHS_CONTINUED: f64 = LEAST_EPOCHS_CONTINUED;

/// Epochs of distillation. In five minutes a distilled ViT-Ti scores k-NN 37.6, the same with
/// LeJEPA 35.2 (docs/methods.md); other lengths were not compared.
const UNMEASURED_BEST_EPOCHS_DISTILLED: f64 = 20.0;
const UNMEASURED_LEAST_EPOCHS_DISTILLED: f64 = 5.0;

/// Why LeJEPA: in 9.2 minutes on two cores it scores k-NN 45.5 and 46.7, DINO in 8.4 minutes 45.6
/// and 45.0; SimCLR's ResNet-18 needs 13 minutes for 43.9 and 45.2 (docs/methods.md).
const LEJEPA: &str = "it needs neither a teacher nor a large batch, and on two cores it scored as much per \
                      minute as any other (docs/methods.md)";

const CONTINUED: &str =
    "weights are given, and training them further helps on images of another kind (docs/continue.md)";

const DISTILLED: &str = "the network of the weights is too slow here to be trained further: a smaller one \
                         learns its features";

const EPOCHS_OF_LEJEPA: &str =
    "on CIFAR-10, 33 passes scored more than 10, and longer runs are not measured (docs/methods.md)";

const EPOCHS_ON_LARGER_IMAGES: &str =
    "how many are best at this size is not measured; on CIFAR-10, 33 passes scored more than 10";

const EPOCHS_OF_CONTINUED: &str = "on CIFAR-10, scores rose for about eight passes (docs/continue.md)";

const EPOCHS_OF_LARGER_CONTINUED: &str =
    "how many are best is not measured; a small network's scores rose for about eight (docs/continue.md)";

const EPOCHS_UNKNOWN: &str = "how many are best is not measured";

/// Candidates; of those for the same weights, the one whose step costs least comes first.
pub(super) static CANDIDATES: [Candidate; 11] = [
    Candidate {
        recipe: "lejepa_cifar",
        settings: &[],
        cpu_settings: &[],
        given: &[Given::Nothing],
        role: Role::FromRandom,
        needs_gpu: false,
        view_px: Some(32),
        least_images: LEAST_IMAGES,
        least_epochs: LEAST_EPOCHS_LEJEPA,
        best_epochs: BEST_EPOCHS_LEJEPA,
        reason: LEJEPA,
        evidence: EPOCHS_OF_LEJEPA,
    },
    Candidate {
        recipe: "lejepa_cifar",
        settings: &["model.image_px=64", "views.crops.0.size_px=64", "views.crops.1.size_px=32"],
        cpu_settings: &[],
        given: &[Given::Nothing],
        role: Role::FromRandom,
        needs_gpu: false,
        view_px: Some(64),
        least_images: UNMEASURED_LEAST_IMAGES,
        least_epochs: UNMEASURED_LEAST_EPOCHS_LEJEPA,
        best_epochs: UNMEASURED_BEST_EPOCHS_64_PX,
        reason: LEJEPA,
        evidence: EPOCHS_ON_LARGER_IMAGES,
    },
    // A ViT-Ti/8.
    Candidate {
        recipe: "lejepa_cifar",
        settings: &[
            "model.image_px=64",
            "model.width=192",
            "model.depth=12",
            "model.heads=3",
            "model.init_std=0.07",
            "views.crops.0.size_px=64",
            "views.crops.1.size_px=32",
        ],
        cpu_settings: &[],
        given: &[Given::Nothing],
        role: Role::FromRandom,
        needs_gpu: false,
        view_px: Some(64),
        least_images: UNMEASURED_LEAST_IMAGES,
        least_epochs: UNMEASURED_LEAST_EPOCHS_LEJEPA,
        best_epochs: UNMEASURED_BEST_EPOCHS_64_PX,
        reason: LEJEPA,
        evidence: EPOCHS_ON_LARGER_IMAGES,
    },
    Candidate {
        recipe: "lejepa_vits8_imagenette",
        settings: &["optim.warmup={percent=1}"],
        // bf16 is slow on some CPUs.
        cpu_settings: &["optim.precision.compute=f32", "optim.batch_size=64"],
        given: &[Given::Nothing],
        role: Role::FromRandom,
        needs_gpu: false,
        view_px: Some(128),
        least_images: UNMEASURED_LEAST_IMAGES_LARGE,
        least_epochs: UNMEASURED_LEAST_EPOCHS_LEJEPA,
        best_epochs: UNMEASURED_BEST_EPOCHS_VITS,
        reason: LEJEPA,
        evidence: "the published run on 9,469 images has 800 passes; shorter ones are not measured",
    },
    Candidate {
        recipe: "lejepa_vits16",
        settings: &["optim.warmup={percent=1}"],
        cpu_settings: &["optim.batch_size=32"],
        given: &[Given::Nothing],
        role: Role::FromRandom,
        needs_gpu: false,
        view_px: Some(224),
        least_images: UNMEASURED_LEAST_IMAGES_LARGE,
        least_epochs: UNMEASURED_LEAST_EPOCHS_LEJEPA,
        best_epochs: UNMEASURED_BEST_EPOCHS_VITS,
        reason: LEJEPA,
        evidence: EPOCHS_UNKNOWN,
    },
    Candidate {
        recipe: "dino_vits16",
        settings: &["optim.warmup={percent=10}", "method.freeze_last_layer={percent=1}"],
        cpu_settings: &[],
        given: &[Given::Nothing],
        role: Role::FromRandom,
        needs_gpu: true,
        view_px: Some(224),
        least_images: UNMEASURED_LEAST_IMAGES_DINO,
        least_epochs: UNMEASURED_LEAST_EPOCHS_DINO,
        best_epochs: BEST_EPOCHS_DINO,
        reason: "there are a GPU, time and many images, for which its published run is the best known",
        evidence: "the published run on 1.28 M images has 100 passes",
    },
    // A ViT-Ti/16 on views that patches of 14 and of 16 px divide.
    Candidate {
        recipe: "distill_vits16",
        settings: &[
            "model.image_px=112",
            "model.width=192",
            "model.heads=3",
            "views.global_px=112",
            "views.n_local=0",
            "optim.batch_size=64",
            "optim.warmup={percent=5}",
        ],
        cpu_settings: &[],
        given: &[Given::Transformer, Given::RotaryTransformer, Given::Convolutional],
        role: Role::Distills,
        needs_gpu: false,
        view_px: Some(112),
        least_images: UNMEASURED_LEAST_IMAGES_WITH_WEIGHTS,
        least_epochs: UNMEASURED_LEAST_EPOCHS_DISTILLED,
        best_epochs: UNMEASURED_BEST_EPOCHS_DISTILLED,
        reason: DISTILLED,
        evidence: EPOCHS_UNKNOWN,
    },
    Candidate {
        recipe: "dinov2_continue",
        settings: &[],
        cpu_settings: &["optim.batch_size=32"],
        given: &[Given::Transformer],
        role: Role::Continues,
        needs_gpu: false,
        view_px: None,
        least_images: UNMEASURED_LEAST_IMAGES_WITH_WEIGHTS,
        least_epochs: UNMEASURED_LEAST_EPOCHS_CONTINUED,
        best_epochs: UNMEASURED_BEST_EPOCHS_CONTINUED,
        reason: CONTINUED,
        evidence: EPOCHS_OF_LARGER_CONTINUED,
    },
    Candidate {
        recipe: "dinov3_continue",
        settings: &[],
        cpu_settings: &["optim.batch_size=32"],
        given: &[Given::RotaryTransformer],
        role: Role::Continues,
        needs_gpu: false,
        view_px: None,
        least_images: UNMEASURED_LEAST_IMAGES_WITH_WEIGHTS,
        least_epochs: UNMEASURED_LEAST_EPOCHS_CONTINUED,
        best_epochs: UNMEASURED_BEST_EPOCHS_CONTINUED,
        reason: CONTINUED,
        evidence: EPOCHS_OF_LARGER_CONTINUED,
    },
    Candidate {
        recipe: "lejepa_vits16",
        settings: &["model=from_init", "optim.warmup={percent=1}"],
        cpu_settings: &["optim.batch_size=32"],
        given: &[Given::Convolutional],
        role: Role::Continues,
        needs_gpu: false,
        view_px: None,
        least_images: UNMEASURED_LEAST_IMAGES_WITH_WEIGHTS,
        least_epochs: UNMEASURED_LEAST_EPOCHS_CONTINUED,
        best_epochs: UNMEASURED_BEST_EPOCHS_CONTINUED,
        reason: "weights of a convolutional network are given, which has no patches to mask \
                 (docs/continue.md)",
        evidence: EPOCHS_UNKNOWN,
    },
    // The settings with which docs/continue.md measured continued training at 32 px.
    Candidate {
        recipe: "dinov2_cifar",
        settings: &[
            "model=from_init",
            "method.freeze_last_layer={percent=5}",
            "optim.freeze_backbone={percent=5}",
            "optim.layer_decay=0.9",
            "optim.lr=2e-3",
        ],
        cpu_settings: &[],
        given: &[Given::SmallTransformer],
        role: Role::Continues,
        needs_gpu: false,
        view_px: None,
        least_images: UNMEASURED_LEAST_IMAGES_WITH_WEIGHTS,
        least_epochs: LEAST_EPOCHS_CONTINUED,
        best_epochs: BEST_EPOCHS_CONTINUED,
        reason: CONTINUED,
        evidence: EPOCHS_OF_CONTINUED,
    },
];

impl Candidate {
    /// Returns whether it is possible with the weights and the device.
    pub(super) fn is_possible(&self, given: Given, is_gpu: bool) -> bool {
        self.given.contains(&given) && (is_gpu || !self.needs_gpu)
    }

    /// Returns whether it suits `n_images` whose short side is `side_px`, if that is known.
    pub(super) fn suits(&self, n_images: u64, side_px: Option<u32>) -> bool {
        let is_enlarged = match (self.view_px, side_px) {
            (Some(view_px), Some(side_px)) => {
                f64::from(view_px) > UNMEASURED_MOST_ENLARGED * f64::from(side_px)
            }
            _ => false,
        };
        n_images >= self.least_images && !is_enlarged
    }
}

/// Returns a warning if the images of `plan` are fewer than are advised for a network of its size.
/// `begins_with_weights` tells whether its run begins with weights that its recipe does not name.
pub fn few_images_warning(plan: &Plan, begins_with_weights: bool) -> Option<String> {
    let recipe = &plan.recipe;
    // A frozen network's weights are learned by the one that is trained.
    let is_taught = !recipe.method.clone().frozen().is_empty();
    let has_weights = begins_with_weights || recipe.init.is_some() || is_taught;
    few_images_warning_for(recipe, has_weights, plan.n_samples)
}

/// Returns a warning if `n_images` are fewer than are advised for the network of `recipe`, given
/// whether its run begins with weights.
pub(super) fn few_images_warning_for(recipe: &Recipe, has_weights: bool, n_images: u64) -> Option<String> {
    let n_params = recipe.model.n_params();
    let least_images = least_images(&recipe.name, has_weights, n_params);
    if n_images >= least_images {
        return None;
    }
    let images = counted(n_images, "image");
    let least = thousands(least_images);
    let evidence = if n_params < SMALL_PARAMS && least_images == LEAST_IMAGES {
        format!("the smallest set that was measured has {least} (docs/small.md)")
    } else {
        format!("{least} or more are advised, a guess that is not measured (docs/hours.md)")
    };
    Some(if has_weights {
        format!(
            "{images} may be too few to improve on the weights that are given: {evidence}; they may be better \
             as they are, which `ocelli probe` tells"
        )
    } else {
        let params = params_in_words(n_params);
        format!(
            "{images} may be too few for a network of {params} from random weights: {evidence}; other weights \
             may be a better start, or better as they are (docs/continue.md)"
        )
    })
}

/// Formats a number of parameters: `0.8 M parameters`, `4,321 parameters`.
fn params_in_words(n_params: usize) -> String {
    if n_params < 100_000 {
        return counted(n_params as u64, "parameter");
    }
    format!("{:.1} M parameters", n_params as f64 / 1e6)
}

/// Returns the number of images from which a run of the recipe called `recipe` is advised, for a
/// network of `n_params` parameters.
fn least_images(recipe: &str, has_weights: bool, n_params: usize) -> u64 {
    if has_weights {
        return UNMEASURED_LEAST_IMAGES_WITH_WEIGHTS;
    }
    let least_for_size = match n_params {
        0..SMALL_PARAMS => LEAST_IMAGES,
        SMALL_PARAMS..LARGE_PARAMS => UNMEASURED_LEAST_IMAGES,
        LARGE_PARAMS.. => UNMEASURED_LEAST_IMAGES_LARGE,
    };
    // A recipe may be a candidate in several sizes.
    let mut least_for_recipe = None;
    for candidate in &CANDIDATES {
        if candidate.recipe == recipe && candidate.role == Role::FromRandom {
            let least = candidate.least_images;
            least_for_recipe = Some(least_for_recipe.map_or(least, |known: u64| known.min(least)));
        }
    }
    least_for_size.max(least_for_recipe.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kinds of weights.
    const ALL_GIVEN: [Given; 5] = [
        Given::Nothing,
        Given::SmallTransformer,
        Given::Transformer,
        Given::RotaryTransformer,
        Given::Convolutional,
    ];

    /// Returns the recipes of the candidates for many images whose short side is `side_px`.
    fn recipes(given: Given, is_gpu: bool, side_px: Option<u32>) -> Vec<&'static str> {
        let mut recipes = Vec::new();
        for candidate in &CANDIDATES {
            if candidate.is_possible(given, is_gpu) && candidate.suits(100_000, side_px) {
                recipes.push(candidate.recipe);
            }
        }
        recipes
    }

    /// All weights have candidates for images from 32 px on, also on a CPU; larger images have
    /// more.
    #[test]
    fn all_weights_have_a_candidate() {
        const CIFAR: &str = "lejepa_cifar";
        const IMAGENETTE: &str = "lejepa_vits8_imagenette";
        for (given, side_px, expected) in [
            (Given::Nothing, Some(21), vec![]),
            (Given::Nothing, Some(32), vec![CIFAR]),
            (Given::Nothing, Some(64), vec![CIFAR; 3]),
            (Given::Nothing, Some(96), vec![CIFAR, CIFAR, CIFAR, IMAGENETTE]),
            (Given::Nothing, Some(224), vec![CIFAR, CIFAR, CIFAR, IMAGENETTE, "lejepa_vits16"]),
            (Given::SmallTransformer, Some(8), vec!["dinov2_cifar"]),
            (Given::SmallTransformer, Some(500), vec!["dinov2_cifar"]),
            (Given::Transformer, Some(32), vec!["dinov2_continue"]),
            (Given::Transformer, Some(96), vec!["distill_vits16", "dinov2_continue"]),
            (Given::RotaryTransformer, Some(32), vec!["dinov3_continue"]),
            (Given::RotaryTransformer, Some(96), vec!["distill_vits16", "dinov3_continue"]),
            (Given::Convolutional, Some(32), vec!["lejepa_vits16"]),
            (Given::Convolutional, Some(96), vec!["distill_vits16", "lejepa_vits16"]),
        ] {
            assert_eq!(recipes(given, false, side_px), expected, "{given:?}, {side_px:?} px");
        }
        let with_gpu = recipes(Given::Nothing, true, None);
        assert_eq!(with_gpu.last(), Some(&"dino_vits16"));
        assert!(!recipes(Given::Nothing, false, None).contains(&"dino_vits16"));
    }

    /// The fewest images by kind of weights, and what has to agree within a candidate.
    #[test]
    fn numbers_of_a_candidate_agree() {
        for given in ALL_GIVEN {
            let possible = CANDIDATES.iter().filter(|candidate| candidate.is_possible(given, false));
            let least = possible.map(|candidate| candidate.least_images).min().unwrap();
            assert_eq!(least, 300, "{given:?}");
        }
        for candidate in &CANDIDATES {
            assert!(candidate.least_epochs <= candidate.best_epochs, "{candidate:?}");
            assert_eq!(candidate.role == Role::FromRandom, candidate.given == [Given::Nothing]);
            // Views of a size that the weights determine are those of weights that are continued.
            assert_eq!(candidate.role == Role::Continues, candidate.view_px.is_none(), "{candidate:?}");
        }
    }

    #[test]
    fn views_may_be_somewhat_larger_than_images() {
        let large = &CANDIDATES[4];
        assert_eq!((large.recipe, large.view_px), ("lejepa_vits16", Some(224)));
        assert!(large.suits(3000, Some(150)) && large.suits(3000, None));
        assert!(!large.suits(3000, Some(149)) && !large.suits(2999, Some(500)));
    }

    #[test]
    fn small_sets_are_known_by_weights_and_size() {
        let small = 800_000;
        let medium = 5_400_000;
        let large = 21_000_000;
        assert_eq!(least_images("mine", false, small), 300);
        assert_eq!(least_images("mine", false, medium), 1000);
        assert_eq!(least_images("mine", false, large), 3000);
        assert_eq!(least_images("mine", true, large), 300);
        assert_eq!(least_images("lejepa_cifar", false, small), 300);
        assert_eq!(least_images("lejepa_cifar", false, medium), 1000);
        assert_eq!(least_images("dino_vits16", false, large), 100_000);
        assert_eq!(least_images("dino_vits16", true, large), 300);
    }
}
