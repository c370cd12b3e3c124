//! Answers to common mistakes: flags and commands of other tools, keys without their section, and
//! names that are nearly right.

use std::error::Error;
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};
use report::shell_quote;
use trainer::estimate::GPUS;
use trainer::recipe::{Key, keys, keys_named};
use trainer::{Plan, Recipe};

/// Similarity from which a word is taken for a misspelled one.
const SIMILAR: f64 = 0.85;

/// Smallest length of a flag that is taken for another one with one letter more, less or different.
const MISSPELLED_LEN: usize = 4;

/// Largest number of names that an answer lists.
const MOST_NAMES: usize = 8;

/// Place of a value that was not typed.
const VALUE: &str = "VALUE";

/// Place of the settings of keys.
const SETTINGS: &str = "SETTINGS";

/// Setting with which a recipe can be read whose backbone is that of weights.
const TRANSFORMER: &str = "model={arch='vit',image_px=224,patch_px=16,width=384,depth=12,heads=6}";

/// Values with which other tools turn a switch off.
const OFF: [&str; 4] = ["false", "no", "off", "0"];

/// Extensions of files of weights.
const WEIGHT_EXTENSIONS: [&str; 5] = ["safetensors", "pth", "pt", "bin", "onnx"];

/// Extensions of recipes of other tools.
const OTHER_RECIPES: [&str; 4] = ["yaml", "yml", "json", "py"];

/// Name of a flag in other tools, or a short one, with what takes its place.
struct FlagGuess {
    /// Names without their hyphens in front, in lower case, separated by spaces.
    names: &'static str,
    /// Commands for which it is an answer, separated by commas; empty for all.
    commands: &'static str,
    replacement: Replacement,
}

/// What takes the place of a flag.
enum Replacement {
    /// Keys, separated by spaces, of which a recipe has one or some, with a unit if they are
    /// lengths.
    Key(&'static str),
    /// Keys as in [`Self::Key`], whose values differ from those of the flag, with a sentence:
    /// `SETTINGS` in it are their settings, `VALUE` the value that was typed.
    Converted { paths: &'static str, text: &'static str },
    /// Keys as in [`Self::Key`], of which the flag gives one of two numbers.
    Pair(&'static Pair),
    /// The first of these flags that the command has, separated by spaces.
    Flag(&'static str),
    /// The argument that the command takes without a flag.
    Argument,
    /// The number of ranks of a plan, from that of GPUs, or the GPU that is named.
    Ranks,
    /// The number of ranks of a plan, from those of nodes and of the ranks of a node.
    Nodes,
    /// The GPU of a plan.
    Gpu,
    /// A sentence; `VALUE` in it is the value that was typed.
    Words(&'static str),
    /// A sentence for the commands that have a flag.
    WordsWith { flag: &'static str, text: &'static str },
}

impl Replacement {
    /// Returns the keys, separated by spaces; nothing if no keys take the place of the flag.
    fn paths(&self) -> &'static str {
        match self {
            Self::Key(paths) | Self::Converted { paths, .. } => paths,
            Self::Pair(pair) => pair.paths,
            _ => "",
        }
    }
}

/// Keys of two numbers, which other tools have two flags for.
struct Pair {
    /// Keys, separated by spaces, of which a recipe has one.
    paths: &'static str,
    /// Flags for the first number, separated by spaces.
    starts: &'static str,
    /// Flags for the second number.
    ends: &'static str,
    /// First number if there is a flag for the second only.
    default_start: &'static str,
    /// Second number if there is a flag for the first only; `None` if it is the same.
    default_end: Option<&'static str>,
    /// What the numbers are.
    meaning: &'static str,
}

const WEIGHT_DECAY: Pair = Pair {
    paths: "optim.weight_decay",
    starts: "wd weight-decay",
    ends: "weight-decay-end wd-end",
    default_start: "0.04",
    default_end: None,
    meaning: "at the start and at the end",
};

const TEACHER_TEMP: Pair = Pair {
    paths: "method.teacher_temp",
    starts: "warmup-teacher-temp",
    ends: "teacher-temp",
    default_start: "0.04",
    default_end: Some("0.04"),
    meaning: "at the start and after the warm-up",
};

const TEACHER_PATCH_TEMP: Pair = Pair {
    paths: "method.teacher_patch_temp",
    starts: "warmup-teacher-patch-temp",
    ends: "teacher-patch-temp",
    default_start: "0.04",
    default_end: Some("0.07"),
    meaning: "at the start and after the warm-up",
};

const TEACHER_DECAY: Pair = Pair {
    paths: "method.teacher_decay method.average_decay method.momentum method.target_decay",
    starts: "momentum-teacher teacher-momentum",
    ends: "final-momentum-teacher momentum-teacher-end",
    default_start: "0.996",
    default_end: Some("1"),
    meaning: "at the start and at the end",
};

const fn key(names: &'static str, paths: &'static str) -> FlagGuess {
    FlagGuess { names, commands: "", replacement: Replacement::Key(paths) }
}

const fn start_of(pair: &'static Pair) -> FlagGuess {
    FlagGuess { names: pair.starts, commands: "", replacement: Replacement::Pair(pair) }
}

const fn end_of(pair: &'static Pair) -> FlagGuess {
    FlagGuess { names: pair.ends, commands: "", replacement: Replacement::Pair(pair) }
}

const fn converted(
    commands: &'static str,
    names: &'static str,
    paths: &'static str,
    text: &'static str,
) -> FlagGuess {
    FlagGuess { names, commands, replacement: Replacement::Converted { paths, text } }
}

const fn flag(names: &'static str, flags: &'static str) -> FlagGuess {
    flag_of("", names, flags)
}

const fn flag_of(commands: &'static str, names: &'static str, flags: &'static str) -> FlagGuess {
    FlagGuess { names, commands, replacement: Replacement::Flag(flags) }
}

const fn words(commands: &'static str, names: &'static str, text: &'static str) -> FlagGuess {
    FlagGuess { names, commands, replacement: Replacement::Words(text) }
}

const fn words_with(flag: &'static str, names: &'static str, text: &'static str) -> FlagGuess {
    FlagGuess { names, commands: "", replacement: Replacement::WordsWith { flag, text } }
}

const fn replace(commands: &'static str, names: &'static str, replacement: Replacement) -> FlagGuess {
    FlagGuess { names, commands, replacement }
}

/// Commands that train.
const TRAINING: &str = "pretrain, quickstart, finetune";

/// Commands that train without labels.
const PRETRAINING: &str = "pretrain, quickstart";

/// Commands for a recipe.
const OF_RECIPES: &str = "pretrain, quickstart, plan, finetune";

/// Commands for a recipe that have no flag for weights called `--checkpoint`.
const OF_RECIPES_ALONE: &str = "pretrain, quickstart, plan";

/// Commands that take runs without a flag.
const OF_RUNS: &str = "report, runs, track";

/// Commands that take shards or images without a flag.
const OF_SHARDS: &str = "shards pack, shards verify, shards ls, shards index, shards stats, shards \
                         contact-sheet, shards resize, shards filter, shards dedup, shards reshard, shards \
                         split, shards subset, shards extract, bench loader";

/// Flags for images.
const DATA: &str = "data data-dir data-path data-root dataset dataset-path train-data train-path train-dir \
                    train root input input-dir i d images image-dir image-folder img-dir path folder \
                    source-dir shards tars url urls trainset";

/// Flags for the number of GPUs, of those of a node if there is another for the number of nodes.
const N_GPUS: &str = "gpus num-gpus ngpus n-gpus devices num-devices";

/// Flags for the number of nodes.
const NODES: &str = "nodes nnodes num-nodes n-nodes";

/// Flags for the number of ranks of a node.
const PER_NODE: &str = "nproc-per-node nproc gpus-per-node ranks-per-node tasks-per-node ntasks-per-node";

/// Keys for the number of local views.
const LOCAL_COUNT: &str = "views.n_local views.crops.1.count";

/// Keys for the areas of global views.
const GLOBAL_SCALE: &str = "views.global_scale views.scale views.crops.0.scale";

/// Keys for the areas of local views.
const LOCAL_SCALE: &str = "views.local_scale views.crops.1.scale";

/// Keys for the size of global views.
const GLOBAL_PX: &str = "views.global_px views.size_px views.crops.0.size_px";

/// Keys for the size of local views.
const LOCAL_PX: &str = "views.local_px views.crops.1.size_px";

/// Answer to flags with which other tools start ranks.
const LAUNCHERS: &str = "each GPU or rank is a process of its own, which a launcher starts: mpirun -n N \
                         ocelli …, or torchrun --no-python --nproc-per-node N ocelli … (docs/ranks.md)";

/// Flags of DINO, DINOv2, timm, lightly, VISSL, MoCo, MAE, Barlow Twins, VICReg, Lightning,
/// transformers and torchrun. An answer for the command comes before one for all.
const FLAGS: &[FlagGuess] = &[
    // Optimizer.
    key("lr learning-rate base-lr blr max-lr peak-lr", "optim.lr"),
    key("epochs epoch num-epochs n-epochs max-epochs num-train-epochs", "optim.length.epochs"),
    key("steps max-steps num-steps n-steps total-steps iterations iters max-iter", "optim.length.steps"),
    key("batch-size batch bs b global-batch-size total-batch-size", "optim.batch_size"),
    converted(
        "",
        "batch-size-per-gpu per-gpu-batch-size per-device-train-batch-size per-device-batch-size",
        "optim.batch_size",
        "use SETTINGS on one rank; the key counts the images of all ranks: VALUE times their number",
    ),
    flag_of(
        "plan",
        "batch-size-per-gpu per-gpu-batch-size per-device-train-batch-size per-device-batch-size",
        "rank-batch",
    ),
    key("minutes max-minutes", "optim.length.minutes"),
    flag("time time-limit max-hours", "hours"),
    key("warmup-epochs warm-up-epochs", "optim.warmup.epochs"),
    key("warmup-steps warmup-iters warm-up-steps", "optim.warmup.steps"),
    start_of(&WEIGHT_DECAY),
    end_of(&WEIGHT_DECAY),
    key("opt optimizer optim", "optim.algorithm"),
    key("momentum", "optim.momentum"),
    key("clip-grad grad-clip clip-norm max-norm max-grad-norm gradient-clip-val", "optim.clip_norm"),
    key("sched scheduler lr-schedule lr-scheduler lr-scheduler-type", "optim.schedule"),
    key(
        "accum-iter grad-accum-steps gradient-accumulation-steps accumulate-grad-batches",
        "optim.micro_batches",
    ),
    key("precision dtype", "optim.precision.compute"),
    words(
        TRAINING,
        "amp fp16 bf16 use-fp16 use-amp mixed-precision half",
        "use --set optim.precision.compute=bf16 for 16 bits",
    ),
    flag_of("plan", "amp fp16 use-fp16 use-amp mixed-precision half", "bf16"),
    // Run.
    key("num-workers workers j n-workers dataloader-num-workers", "run.data_threads"),
    key("save-every save-steps", "run.checkpoint_every_steps"),
    converted(
        "",
        "saveckp-freq save-freq save-interval checkpoint-freq save-epochs",
        "run.checkpoint_every_steps",
        "checkpoints are counted in steps, not in epochs: --set run.checkpoint_every_steps=STEPS, VALUE \
         times the steps of an epoch, which are its images divided by optim.batch_size",
    ),
    key("print-freq log-interval log-freq logging-steps log-every-n-steps", "run.log_every_steps"),
    key("eval-steps", "run.probe_every_steps"),
    converted(
        "",
        "eval-freq eval-every val-freq eval-interval",
        "run.probe_every_steps",
        "scores are counted in steps: --set run.probe_every_steps=STEPS; an epoch has as many steps as \
         images divided by optim.batch_size",
    ),
    key("save-total-limit keep-last", "run.keep_checkpoints"),
    key("early-stopping early-stop early-stopping-patience", "run.patience"),
    key("val-part val-split val-ratio val-fraction validation-split", "data.validation"),
    key("seed random-seed manual-seed", "seed"),
    // Method, views and backbone.
    key("out-dim", "method.prototypes method.output method.head_output"),
    key("nmb-prototypes num-prototypes n-prototypes head-n-prototypes", "method.prototypes"),
    key("moco-dim proj-dim projection-dim feat-dim", "method.output method.head_output"),
    start_of(&TEACHER_DECAY),
    end_of(&TEACHER_DECAY),
    key(
        "ema ema-decay moco-m base-tau",
        "method.teacher_decay method.average_decay method.momentum method.target_decay",
    ),
    start_of(&TEACHER_TEMP),
    end_of(&TEACHER_TEMP),
    start_of(&TEACHER_PATCH_TEMP),
    end_of(&TEACHER_PATCH_TEMP),
    key("warmup-teacher-temp-epochs", "method.teacher_temp_warmup.epochs"),
    key("moco-t tau temperature temp", "method.temperature method.student_temp"),
    key("lambd", "method.redundancy_weight"),
    key("scale-loss", "method.loss_scale"),
    key("sim-coeff", "method.invariance_weight"),
    key("std-coeff", "method.variance_weight"),
    key("cov-coeff", "method.covariance_weight"),
    key("local-crops-number num-local-crops n-local-crops nmb-local-crops n-local", LOCAL_COUNT),
    key("global-crops-scale global-crop-scale global-scale scale", GLOBAL_SCALE),
    key("local-crops-scale local-crop-scale local-scale", LOCAL_SCALE),
    key("global-crops-size global-crop-size global-px size-px", GLOBAL_PX),
    key("local-crops-size local-crop-size local-px", LOCAL_PX),
    key("drop-path-rate stochastic-depth", "model.drop_path"),
    key("patch-size", "model.patch_px"),
    key("embed-dim hidden-size hidden-dim", "model.width"),
    key("num-layers num-hidden-layers n-blocks", "model.depth"),
    key("num-heads num-attention-heads n-heads", "model.heads"),
    key("in-chans in-channels num-channels n-channels", "data.channels"),
    flag("img-size image-size input-size imgsz crop-size resolution", "image-px"),
    converted(
        OF_RECIPES,
        "img-size image-size input-size imgsz crop-size resolution image-px",
        GLOBAL_PX,
        "use SETTINGS for the size of views, and --set model.image_px=VALUE for that of the backbone",
    ),
    flag("model arch backbone network m a", "checkpoint"),
    words(
        OF_RECIPES_ALONE,
        "model arch backbone network m a method algorithm loss",
        "method and backbone are parts of a recipe: `ocelli recipe list` lists recipes, and `ocelli recipe \
         new --method dino --arch vit` prints a new one",
    ),
    // Inputs and outputs.
    flag_of("embed, export, probe", "workdir work-dir run run-dir experiment-dir", "checkpoint"),
    flag(
        "output output-dir out-dir outdir o save-dir save-path logdir log-dir exp-dir experiment-dir \
         dump-path work-dir run-dir checkpoint-dir result-dir default-root-dir out workdir dest destination",
        "workdir out",
    ),
    replace(
        OF_RUNS,
        "workdir work-dir run run-dir experiment-dir exp-dir checkpoint-dir ckpt-dir log-dir logdir path \
         folder dir root input input-dir i d w",
        Replacement::Argument,
    ),
    replace(
        "runs, track",
        "checkpoint ckpt out out-dir output output-dir o save-dir dump-path result-dir default-root-dir",
        Replacement::Argument,
    ),
    flag(DATA, "shards images train"),
    replace(OF_SHARDS, DATA, Replacement::Argument),
    words(
        "plan",
        DATA,
        "a plan of a recipe opens no images: give their number with --images N; --shards is for --hours",
    ),
    flag_of("plan", "num-images n-images dataset-size n-samples num-samples", "images"),
    flag("n num limit max-images num-images n-images", "count n-images"),
    flag("val val-dir val-data val-path valid", "test probe-test val-shards"),
    flag("test-dir test-data testset test", "test probe-test test-shards"),
    flag("config config-file config-name cfg conf c yaml r", "recipe"),
    flag_of(TRAINING, "w", "workdir"),
    flag(
        "pretrained pretrained-weights weight weights init init-weights init-from load load-from model-path \
         ckpt ckpt-path checkpoint checkpoint-path finetune w",
        "checkpoint init",
    ),
    flag("force f overwrite replace yes y", "overwrite"),
    flag_of("export, runs", "f", "format"),
    flag_of("embed", "n-last-blocks n-blocks layers num-last-layers", "levels"),
    flag("avgpool avgpool-patchtokens avg-pool", "average"),
    flag("label-col label-key labels", "label-column"),
    flag("image-col image-key", "image-column"),
    flag("dump-features save-features features-out", "out"),
    flag("max-samples maxcount shard-size samples", "samples-per-shard"),
    flag("maxsize max-shard-size", "bytes-per-shard"),
    words_with("device", "gpu cuda accelerator use-gpu g", "use --device cuda, or cuda:N for GPU number N"),
    flag("like-image query queries q", "like"),
    flag("similarity sim thresh thr epsilon", "threshold"),
    // Scores.
    words("probe", "k nb-knn knn-k n-neighbors", "neighbors are set with --set knn.k=VALUE"),
    words(
        "probe",
        "epochs num-epochs lr learning-rate batch-size",
        "settings belong to a protocol: --set PROTOCOL.KEY=VALUE, such as --set linear-honest.epochs=20; an \
         unknown one prints the list",
    ),
    flag("eval-type metric task", "protocol"),
    words(
        "embed, export, report",
        "batch-size batch bs b",
        "leave it out: the size of batches is chosen by the memory, and changes no feature",
    ),
    words(
        PRETRAINING,
        "eval evaluate knn linear-eval validate",
        "give labeled shards with --probe-train and --probe-test to score while training, or run `ocelli \
         probe` afterwards",
    ),
    words(
        "finetune",
        "eval evaluate validate",
        "leave it out: the classifier is scored on --val-shards, or on a part of the images, while it trains",
    ),
    words(
        "finetune",
        "classes num-classes n-classes nb-classes",
        "leave it out: the classes are those of the images; --set 'method.classes=[\"cat\",\"dog\"]' sets \
         their order",
    ),
    words("export", "onnx to-onnx", "give --out FILE.onnx"),
    words("export", "opset opset-version", "leave it out: a graph states the version that it needs"),
    words(
        "finetune",
        "softmax probabilities",
        "export the run afterwards, by `ocelli export --checkpoint RUN --out FILE.onnx --probabilities`",
    ),
    words(
        TRAINING,
        "lora use-lora lora-r lora-rank lora-alpha adapter adapters peft",
        "use --set optim.adapter='{rank=8, alpha=16}' with initial weights (docs/finetune.md#adapters)",
    ),
    // Starts of runs.
    words(
        "finetune",
        "resume auto-resume resume-from resume-from-checkpoint continue no-resume restart",
        "the same command resumes the run in its --workdir",
    ),
    words(
        PRETRAINING,
        "resume auto-resume resume-from resume-from-checkpoint continue no-resume restart",
        "the same command resumes the run in its --workdir; --fork RUN begins another run with its \
         checkpoint, --init WEIGHTS with its weights alone",
    ),
    replace("plan", N_GPUS, Replacement::Ranks),
    flag_of("plan", "world-size np n", "ranks"),
    replace("plan", NODES, Replacement::Nodes),
    replace("plan", PER_NODE, Replacement::Nodes),
    replace("plan", "gpu-name gpu-type gpu-model accelerator device", Replacement::Gpu),
    words_with("engine", N_GPUS, LAUNCHERS),
    words_with("engine", NODES, LAUNCHERS),
    words_with("engine", PER_NODE, LAUNCHERS),
    words_with(
        "engine",
        "world-size np strategy distributed ddp dist-url multiprocessing-distributed launcher rank \
         local-rank",
        LAUNCHERS,
    ),
    words("pretrain, quickstart, finetune, embed, doctor, bench shard", "n", LAUNCHERS),
    words(
        TRAINING,
        "wandb use-wandb wandb-project project tensorboard logger report-to mlflow",
        "metrics for TensorBoard are always written into the work directory, and `ocelli track` sends a run \
         to MLflow (docs/tracking.md)",
    ),
    words(
        TRAINING,
        "dry-run check test-run estimate",
        "`ocelli plan` estimates memory and time of a recipe without starting it",
    ),
    words(
        "",
        "compile torch-compile channels-last cudnn-benchmark pin-mem pin-memory prefetch",
        "leave it out: the program has no such choice",
    ),
    words("", "debug", "use --verbose"),
];

/// Command of another tool, with what takes its place.
struct CommandGuess {
    /// Command within which it is typed; empty for the program itself.
    within: &'static str,
    /// Names in lower case, separated by spaces.
    names: &'static str,
    answer: &'static str,
}

const fn command(within: &'static str, names: &'static str, answer: &'static str) -> CommandGuess {
    CommandGuess { within, names, answer }
}

const COMMANDS: &[CommandGuess] = &[
    command("", "train training pretraining fit run start launch ssl main continue", "use `ocelli pretrain`"),
    command(
        "",
        "resume restart",
        "use `ocelli pretrain` again with the same flags: it resumes the run in its --workdir",
    ),
    command(
        "",
        "eval evaluate evaluation knn linear linear-probe linprobe linear-eval test val validate score \
         benchmark-features",
        "use `ocelli probe`",
    ),
    command(
        "",
        "extract extract-features features feature embeddings embedding encode forward",
        "use `ocelli embed`",
    ),
    command(
        "",
        "predict prediction infer inference",
        "use `ocelli embed` for features; for classes, `ocelli export --checkpoint RUN --out FILE.onnx \
         --probabilities` exports a run of `ocelli finetune`, and FILE.onnx.md has a program that prints them",
    ),
    command(
        "",
        "fine-tune finetuning ft train-classifier classify classifier supervised",
        "use `ocelli finetune`, which trains a classifier with its backbone, or `ocelli probe`, which fits \
         classifiers on features; to classify new images, `ocelli export --checkpoint RUN --out FILE.onnx \
         --probabilities` writes a program beside the file, in FILE.onnx.md",
    ),
    command(
        "",
        "segment segmentation semantic-segmentation masks",
        "use `ocelli finetune --recipe segment`, which trains a decoder that labels pixels; `ocelli probe \
         --protocol segmentation` fits one on features",
    ),
    command(
        "",
        "distill distillation",
        "use `ocelli pretrain --recipe distill_vits16 --set method.teacher.weights=WEIGHTS`",
    ),
    command("", "convert save to-onnx onnx checkpoint", "use `ocelli export`"),
    command("", "estimate memory cost dry-run", "use `ocelli plan`"),
    command("", "info env check devices diagnose nvidia-smi", "use `ocelli doctor`"),
    command("", "list-runs status history ps jobs", "use `ocelli runs`"),
    command("", "html plot visualize viz attention dashboard", "use `ocelli report`"),
    command(
        "",
        "mlflow wandb tensorboard log logs",
        "use `ocelli track` for MLflow; TensorBoard reads the work directory of a run (docs/tracking.md)",
    ),
    command("", "demo example tutorial init", "use `ocelli quickstart`"),
    command("", "recipes models configs config list-recipes zoo", "use `ocelli recipe list`"),
    command("", "webdataset wds tar dataset data prepare", "use `ocelli shards pack`"),
    command(
        "",
        "download pull fetch",
        "nothing is downloaded by the program: docs/weights.md says where weights are, and --shards takes \
         URLs",
    ),
    command("shards", "create make write convert build add", "use `ocelli shards pack`"),
    command("shards", "info count describe statistics", "use `ocelli shards stats`"),
    command("shards", "check validate test fsck", "use `ocelli shards verify`"),
    command("shards", "list show cat", "use `ocelli shards ls`"),
    command("shards", "unpack untar export", "use `ocelli shards extract`"),
    command("shards", "shuffle merge join", "use `ocelli shards reshard`"),
    command("shards", "preview view sheet plot", "use `ocelli shards contact-sheet`"),
    command("curate", "dedup deduplicate duplicates", "use `ocelli curate near-duplicates`"),
    command("curate", "cluster kmeans sample", "use `ocelli curate balance`"),
    command("curate", "search query similar", "use `ocelli curate retrieve`"),
    command("recipe", "ls all names", "use `ocelli recipe list`"),
    command("recipe", "print cat get", "use `ocelli recipe show NAME`"),
    command("recipe", "create init write", "use `ocelli recipe new --method NAME`"),
    command("recipe", "help options explain schema", "use `ocelli recipe keys`"),
];

/// What a flag that is required expects.
struct Need {
    flag: &'static str,
    /// Commands, separated by commas; empty for all.
    commands: &'static str,
    words: &'static str,
}

const NEEDS: &[Need] = &[
    Need {
        flag: "recipe",
        commands: "pretrain",
        words: "a name that `ocelli recipe list` lists, or a file; with --hours N, one is chosen",
    },
    Need { flag: "recipe", commands: "", words: "a name that `ocelli recipe list` lists, or a file" },
    Need { flag: "workdir", commands: "", words: "a new folder for the run, such as runs/mine" },
    Need {
        flag: "checkpoint",
        commands: "probe",
        words: "a run's work directory, or weights of another library (or --watch a run)",
    },
    Need { flag: "checkpoint", commands: "", words: "a run's work directory, or weights of another library" },
    Need {
        flag: "train",
        commands: "probe",
        words: "labeled images to fit on; without labels, --label-free",
    },
    Need { flag: "test", commands: "probe", words: "labeled images to score; with --label-free, any images" },
    Need { flag: "shards", commands: "", words: "a folder of images, or shards" },
    Need { flag: "method", commands: "recipe new", words: "such as dino, simclr or lejepa" },
    Need { flag: "out", commands: "embed", words: "a file that ends in .npy, .parquet or .safetensors" },
    Need { flag: "out", commands: "", words: "a new file or folder for the result" },
];

/// Command that a command line calls.
struct Called<'a> {
    command: &'a Command,
    /// Name without that of the program: `shards pack`; empty for the program itself.
    name: String,
    /// Words that follow the name.
    rest: &'a [String],
    /// Recipe that is used, if it can be read.
    recipe: Option<RecipeKeys>,
}

/// What determines the keys of a recipe.
struct RecipeKeys {
    name: String,
    /// Its settings that are words, such as `method.name = "dino"`.
    words: Vec<String>,
    /// Number of entries of `views.crops`.
    n_crops: usize,
}

/// Flag that a command does not have, or a setting whose key no recipe has.
struct UnknownFlag<'a> {
    /// With its hyphens, without its value.
    typed: &'a str,
    values: Vec<&'a str>,
}

impl RecipeKeys {
    /// Reads the keys of the recipe called `name`, whose text is `text`.
    fn read(name: &str, text: &str) -> Option<Self> {
        let recipe = Recipe::parse(text, name, &[]);
        let recipe = recipe.or_else(|_| Recipe::parse(text, name, &[TRANSFORMER.into()])).ok()?;
        let mut words = Vec::new();
        let mut n_crops = 0;
        for (path, value) in recipe.values() {
            if let Some(word) = value.as_str() {
                words.push(format!("{path} = \"{word}\""));
            }
            if let Some(crops) = value.as_array()
                && path == "views.crops"
            {
                n_crops = crops.len();
            }
        }
        Some(Self { name: name.into(), words, n_crops })
    }

    /// Returns whether the recipe may have `key`.
    fn has_key(&self, key: &Key) -> bool {
        key.belongs_to.is_empty() || key.belongs_to.iter().any(|setting| self.words.contains(setting))
    }

    /// Returns whether the recipe may have a key at `path`.
    fn has_path(&self, path: &str) -> bool {
        let crop = path.strip_prefix("views.crops.").and_then(|rest| rest.split('.').next());
        if let Some(Ok(crop)) = crop.map(str::parse::<usize>)
            && crop >= self.n_crops
        {
            return false;
        }
        keys_at(path).iter().any(|key| self.has_key(key))
    }
}

/// Returns the answer to `error`, which clap found in the command line `words` of `program`, the
/// built command; `None` if clap's own message is better. `recipes` are the names of recipes, and
/// `read_recipe` returns the text of one, or of a file.
pub(crate) fn answer_usage(
    error: &clap::Error,
    words: &[String],
    program: &Command,
    recipes: &[&str],
    read_recipe: fn(&str) -> Option<String>,
) -> Option<String> {
    let called = find_called(program, words, read_recipe);
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let word = text_of(error, ContextKind::InvalidArg)?;
            if word.starts_with('-') {
                answer_flags(&called)
            } else {
                answer_argument(&word, &called, recipes)
            }
        }
        ErrorKind::InvalidSubcommand => {
            let word = text_of(error, ContextKind::InvalidSubcommand)?;
            answer_command(&word, &called, program, recipes)
        }
        ErrorKind::MissingRequiredArgument => answer_missing(error, &called),
        ErrorKind::ValueValidation => answer_value(error),
        ErrorKind::ArgumentConflict => answer_conflict(error, &called),
        _ => None,
    }
}

/// Answers flags of a command that exclude each other.
fn answer_conflict(error: &clap::Error, called: &Called<'_>) -> Option<String> {
    let first = text_of(error, ContextKind::InvalidArg)?;
    let second = text_of(error, ContextKind::PriorArg)?;
    let is_first = first.starts_with("--hours");
    if is_first == second.starts_with("--hours") {
        return None;
    }
    let other = if is_first { second } else { first };
    if called.name != "plan" {
        return None;
    }
    let flag = other.split_whitespace().next()?;
    Some(format!(
        "--hours chooses a recipe for the images of --shards on this machine, so it does not take {flag}: \
         leave out --hours to estimate a recipe; `ocelli pretrain --recipe RECIPE --hours HOURS` fits one \
         into a time"
    ))
}

/// Returns the text of a part of `error`.
fn text_of(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        _ => None,
    }
}

/// Finds the command that `words`, which begin with the name of the program, call.
fn find_called<'a>(
    program: &'a Command,
    words: &'a [String],
    read_recipe: fn(&str) -> Option<String>,
) -> Called<'a> {
    let mut command = program;
    let mut names: Vec<&str> = Vec::new();
    let mut n_used = words.len().min(1);
    for (index, word) in words.iter().enumerate().skip(1) {
        if !command.has_subcommands() {
            break;
        }
        if let Some(found) = command.find_subcommand(word) {
            command = found;
            names.push(found.get_name());
            n_used = index + 1;
        } else if !is_flag(word) && !is_flag(&words[index - 1]) {
            // Any other word is the value of a flag.
            break;
        }
    }
    let name = names.join(" ");
    let rest = &words[n_used..];
    let used = used_recipe(command, &name, rest);
    let recipe = used.and_then(|used| RecipeKeys::read(used, &read_recipe(used)?));
    Called { command, name, rest, recipe }
}

/// Returns the name of the recipe that a command uses, which is called `name` and followed by
/// `rest`.
fn used_recipe<'a>(command: &'a Command, name: &str, rest: &'a [String]) -> Option<&'a str> {
    if name == "quickstart" {
        return Some("quickstart");
    }
    for (index, word) in rest.iter().enumerate() {
        if word == "--recipe" {
            return rest.get(index + 1).map(String::as_str);
        }
        if let Some(recipe) = word.strip_prefix("--recipe=") {
            return Some(recipe);
        }
    }
    let flag = command.get_arguments().find(|argument| argument.get_long() == Some("recipe"))?;
    flag.get_default_values().first()?.as_os_str().to_str()
}

impl Called<'_> {
    /// Returns the name with that of the program.
    fn full_name(&self) -> String {
        if self.name.is_empty() { "ocelli".into() } else { format!("ocelli {}", self.name) }
    }

    /// Returns the flag `--name` of the command.
    fn flag(&self, name: &str) -> Option<&Arg> {
        self.command.get_arguments().find(|argument| {
            argument.get_long() == Some(name)
                || argument.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
        })
    }

    /// Returns whether the command has the flag `--name`.
    fn has_flag(&self, name: &str) -> bool {
        self.flag(name).is_some()
    }

    /// Returns whether the flag `--name` of the command is a switch, which takes no value.
    fn is_switch(&self, name: &str) -> bool {
        self.flag(name).is_some_and(|flag| !flag.get_action().takes_values())
    }

    /// Returns the flag `--name` of the command as it is typed with `values`: with all of them, the
    /// first or none, as the flag takes them.
    fn with_values(&self, name: &str, values: &[&str]) -> String {
        let taken = match self.flag(name) {
            Some(_) if self.is_switch(name) => String::new(),
            Some(flag) => taken_values(flag, values),
            None => quoted(values),
        };
        format!("--{name}{taken}")
    }

    /// Returns whether the recipe may have a key at `path`, as far as it is known.
    fn may_have(&self, path: &str) -> bool {
        self.recipe.as_ref().is_none_or(|recipe| recipe.has_path(path))
    }

    /// Returns whether the command has the short flag `-letter`.
    fn has_short(&self, letter: char) -> bool {
        self.command.get_arguments().any(|argument| argument.get_short() == Some(letter))
    }

    /// Returns the flag of the command that differs from `name` in one letter, or in the order of
    /// two.
    fn flag_like(&self, name: &str) -> Option<&str> {
        if name.len() < MISSPELLED_LEN {
            return None;
        }
        let mut flags = self.command.get_arguments().filter_map(|argument| argument.get_long());
        flags.find(|flag| strsim::osa_distance(flag, name) == 1)
    }

    /// Returns whether `--set` of the command takes settings of a recipe.
    fn takes_settings(&self) -> bool {
        let set = self.command.get_arguments().find(|argument| argument.get_long() == Some("set"));
        let names = set.and_then(|set| set.get_value_names()).unwrap_or_default();
        names.first().is_some_and(|name| name.as_str() == "KEY=VALUE")
    }

    /// Returns the first of `flags`, separated by spaces, that the command has.
    fn first_flag(&self, flags: &'static str) -> Option<&'static str> {
        flags.split(' ').find(|flag| self.has_flag(flag))
    }

    /// Returns the flags that were typed and that the command does not have.
    fn unknown_flags(&self) -> Vec<UnknownFlag<'_>> {
        let mut unknown = Vec::new();
        for (index, word) in self.rest.iter().enumerate() {
            if word == "--" {
                break;
            }
            if !is_flag(word) || self.has(word) {
                continue;
            }
            let mut parts = word.splitn(2, '=');
            let typed = parts.next().unwrap_or_default();
            let mut values: Vec<&str> = parts.collect();
            if values.is_empty() {
                let following = self.rest[index + 1..].iter().map(String::as_str);
                values.extend(following.take_while(|word| !is_flag(word)));
            }
            unknown.push(UnknownFlag { typed, values });
        }
        unknown
    }

    /// Returns the value of the first flag that was typed with one of `names`, separated by spaces.
    fn typed_value(&self, names: &str) -> Option<&str> {
        for (index, word) in self.rest.iter().enumerate() {
            if !is_flag(word) {
                continue;
            }
            let mut parts = word.splitn(2, '=');
            let name = plain_name(parts.next().unwrap_or_default());
            if lists(names, " ", &name) {
                let following = self.rest.get(index + 1).filter(|word| !is_flag(word));
                return parts.next().or(following.map(String::as_str));
            }
        }
        None
    }

    /// Returns the value of the first flag that was typed with one of `names`, if it is a number.
    fn typed_number(&self, names: &str) -> Option<u64> {
        self.typed_value(names)?.parse().ok()
    }

    /// Returns whether the command has the flag that `word` begins with.
    fn has(&self, word: &str) -> bool {
        let name = word.split('=').next().unwrap_or_default();
        match name.strip_prefix("--") {
            Some(long) => self.has_flag(long),
            None => name.chars().nth(1).is_some_and(|letter| self.has_short(letter)),
        }
    }
}

/// Returns whether `word` is a flag, not a value such as `-1`.
fn is_flag(word: &str) -> bool {
    let rest = word.trim_start_matches('-');
    rest.len() < word.len() && rest.starts_with(|c: char| c.is_alphabetic())
}

/// Returns the values that `argument` takes, all or the first, as [`quoted`] does.
fn taken_values(argument: &Arg, values: &[&str]) -> String {
    let takes_several = argument.get_num_args().is_some_and(|range| range.max_values() > 1);
    let n_taken = if takes_several { values.len() } else { values.len().min(1) };
    quoted(&values[..n_taken])
}

/// Returns `values` as they are typed in a shell, each after a space.
fn quoted(values: &[&str]) -> String {
    let mut text = String::new();
    for value in values {
        text.push(' ');
        text += &shell_quote(value);
    }
    text
}

/// Answers all flags that the command does not have; `None` if nothing is known of any of them.
fn answer_flags(called: &Called<'_>) -> Option<String> {
    let unknown = called.unknown_flags();
    let answers: Vec<Option<String>> = unknown.iter().map(|flag| answer_flag(flag, called)).collect();
    if answers.iter().all(Option::is_none) {
        return None;
    }
    let name = called.full_name();
    if let ([flag], [Some(answer)]) = (unknown.as_slice(), answers.as_slice()) {
        return Some(format!("{} is no flag of `{name}`: {answer}", flag.typed));
    }
    let mut text = format!("`{name}` does not have {} of these flags:", unknown.len());
    for (flag, answer) in unknown.iter().zip(answers) {
        let answer = answer.unwrap_or_else(|| format!("`{name} --help` lists the flags"));
        text += &format!("\n  {}: {answer}", flag.typed);
    }
    Some(text)
}

/// Returns what takes the place of a flag that the command does not have.
fn answer_flag(flag: &UnknownFlag<'_>, called: &Called<'_>) -> Option<String> {
    let name = plain_name(flag.typed);
    if called.has_flag(&name) {
        return Some(format!("use {}", called.with_values(&name, &flag.values)));
    }
    let own = FLAGS.iter().filter(|guess| !guess.commands.is_empty());
    let others = FLAGS.iter().filter(|guess| guess.commands.is_empty());
    for guess in own.chain(others) {
        if lists(guess.names, " ", &name)
            && is_for(guess.commands, called)
            && let Some(answer) = apply(&guess.replacement, flag, called)
        {
            return Some(answer);
        }
    }
    if let Some(like) = called.flag_like(&name) {
        return Some(format!("did you mean {}?", called.with_values(like, &flag.values)));
    }
    if called.takes_settings()
        && let Some(answer) = answer_key(flag, called)
    {
        return Some(answer);
    }
    let flags = called.command.get_arguments().filter_map(|argument| argument.get_long());
    let nearest = nearest(&name, flags)?;
    Some(format!("did you mean {}?", called.with_values(nearest, &flag.values)))
}

/// Returns the name of a flag or a key in lower case and with hyphens, but without those in front.
fn plain_name(typed: &str) -> String {
    typed.trim_start_matches('-').replace('_', "-").to_lowercase()
}

/// Returns whether `name` is one of `names`, which are separated by `separator`.
fn lists(names: &str, separator: &str, name: &str) -> bool {
    names.split(separator).any(|listed| listed == name)
}

/// Returns whether `commands`, separated by commas, are empty or list the command that is called.
fn is_for(commands: &str, called: &Called<'_>) -> bool {
    commands.is_empty() || lists(commands, ", ", &called.name)
}

/// Applies `replacement` to a flag; `None` if the command cannot follow it.
fn apply(replacement: &Replacement, flag: &UnknownFlag<'_>, called: &Called<'_>) -> Option<String> {
    let value = first_value(&flag.values);
    match replacement {
        Replacement::Key(_) | Replacement::Converted { .. } | Replacement::Pair(_) => {
            if !called.takes_settings() {
                return None;
            }
            answer_key(flag, called)
        }
        Replacement::Flag(flags) => {
            let name = called.first_flag(flags)?;
            if name == "recipe" && is_recipe_of_other_tools(value) {
                return Some(format!(
                    "use --recipe NAME (`ocelli recipe list`) or --recipe FILE.toml (`ocelli recipe new` \
                     prints one): {value} is not TOML"
                ));
            }
            if called.is_switch(name) && OFF.contains(&value.to_lowercase().as_str()) {
                return Some(format!("leave it out: --{name} is off unless it is given"));
            }
            Some(format!("use {}", called.with_values(name, &flag.values)))
        }
        Replacement::Argument => {
            let argument = called.command.get_positionals().next()?;
            let typed = taken_values(argument, &flag.values);
            if typed.is_empty() {
                return Some("it is given without a flag".into());
            }
            Some(format!("it is given without a flag: `{}{typed}`", called.full_name()))
        }
        Replacement::Ranks => Some(answer_ranks(flag, called)),
        Replacement::Nodes => Some(answer_nodes(called)),
        Replacement::Gpu => Some(answer_gpu(value)),
        Replacement::Words(text) => Some(text.replace(VALUE, value)),
        Replacement::WordsWith { flag: needed, text } => {
            if !called.has_flag(needed) {
                return None;
            }
            Some(text.replace(VALUE, value))
        }
    }
}

/// Answers a flag for the number of GPUs of a plan, with which other tools also name their GPU.
fn answer_ranks(flag: &UnknownFlag<'_>, called: &Called<'_>) -> String {
    let Some(first) = flag.values.first() else { return "use --ranks N".into() };
    let is_number = first.parse::<u64>().is_ok();
    if !is_number || GPUS.iter().any(|gpu| gpu.name == *first) {
        return answer_gpu(first);
    }
    if called.typed_value(NODES).is_some() {
        return answer_nodes(called);
    }
    format!("use {}", called.with_values("ranks", &flag.values))
}

/// Answers a flag for the number of nodes of a plan, or for that of the ranks of a node.
fn answer_nodes(called: &Called<'_>) -> String {
    let n_nodes = called.typed_number(NODES);
    let per_node = called.typed_number(PER_NODE).or_else(|| called.typed_number(N_GPUS));
    match (n_nodes, per_node) {
        (Some(n_nodes), Some(per_node)) => {
            format!("use --ranks {} --ranks-per-node {per_node}", n_nodes.saturating_mul(per_node))
        }
        (Some(n_nodes), None) => format!(
            "--ranks is the number of nodes, {n_nodes}, times --ranks-per-node: use --ranks {} \
             --ranks-per-node 8 for nodes of 8 GPUs",
            n_nodes.saturating_mul(8)
        ),
        (None, Some(per_node)) => format!("use --ranks {per_node} --ranks-per-node {per_node} for one node"),
        (None, None) => "--ranks is the number of nodes times --ranks-per-node".into(),
    }
}

/// Answers a flag that names the GPU of a plan.
fn answer_gpu(typed: &str) -> String {
    let typed = typed.to_lowercase();
    let mut names: Vec<&str> = GPUS.iter().map(|gpu| gpu.name).collect();
    names.push("cpu");
    let mut flags = Vec::new();
    for name in &names {
        if name.starts_with(&typed) || typed.starts_with(name) {
            flags.push(format!("--gpu {name}"));
        }
    }
    if flags.is_empty() {
        return format!("--gpu names the GPU of each rank, {}; --ranks is their number", list(&names));
    }
    format!("use {}", flags.join(" or "))
}

/// Answers a flag or the key of a setting with the keys of this name, and with those that other
/// tools call so, as far as the recipe has them; `None` if there are none in any recipe.
fn answer_key(flag: &UnknownFlag<'_>, called: &Called<'_>) -> Option<String> {
    let name = plain_name(flag.typed);
    let guess = key_guess(&name);
    let paths = paths_called(&name, guess);
    if paths.is_empty() {
        return None;
    }
    let mut settings = Vec::new();
    for path in paths.iter().filter(|path| called.may_have(path)).take(MOST_NAMES) {
        let setting = match guess.map(|guess| &guess.replacement) {
            Some(Replacement::Pair(pair)) => pair_setting(pair, path, flag, called),
            _ => setting_of(path, &flag.values, called),
        };
        settings.push(format!("--set {setting}"));
    }
    let settings = settings.join(" or ");
    if settings.is_empty()
        && let Some(recipe) = &called.recipe
    {
        let others = paths.join(" or ");
        return Some(format!("recipe {} has no such key; others have {others}", recipe.name));
    }
    let value = first_value(&flag.values);
    Some(match guess.map(|guess| &guess.replacement) {
        Some(Replacement::Pair(pair)) => format!("use {settings}, {}", pair.meaning),
        Some(Replacement::Converted { text, .. }) => text.replace(VALUE, value).replace(SETTINGS, &settings),
        _ => format!("use {settings}"),
    })
}

/// Returns the paths of the keys called `name`, then those of `guess`, each once; the first entry
/// stands for all of a list.
fn paths_called(name: &str, guess: Option<&FlagGuess>) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for key in keys_named(name) {
        let path = key.path.replace("[]", ".0");
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    if let Some(guess) = guess {
        for path in guess.replacement.paths().split(' ') {
            if !paths.iter().any(|other| other == path) {
                paths.push(path.into());
            }
        }
    }
    paths
}

/// Returns the argument of `--set` that gives the pair at `path` the number of `flag`, and that of
/// the flag for the other number if it was typed.
fn pair_setting(pair: &Pair, path: &str, flag: &UnknownFlag<'_>, called: &Called<'_>) -> String {
    let &[value] = flag.values.as_slice() else { return setting_of(path, &flag.values, called) };
    if value.parse::<f64>().is_err() {
        return setting_of(path, &flag.values, called);
    }
    if lists(pair.ends, " ", &plain_name(flag.typed)) {
        let start = called.typed_value(pair.starts).unwrap_or(pair.default_start);
        return setting_of(path, &[start, value], called);
    }
    let default_end = pair.default_end.unwrap_or(value);
    let end = called.typed_value(pair.ends).unwrap_or(default_end);
    setting_of(path, &[value, end], called)
}

/// Returns the first of the values that were typed, or its place.
fn first_value<'a>(values: &[&'a str]) -> &'a str {
    values.first().copied().unwrap_or(VALUE)
}

/// Returns the argument of `--set` that gives the key at `path`, which may end in a unit of length,
/// the values that were typed.
fn setting_of(path: &str, values: &[&str], called: &Called<'_>) -> String {
    let pattern = pattern_of(path);
    for key in keys_at(path) {
        let is_of_recipe = called.recipe.as_ref().is_none_or(|recipe| recipe.has_key(&key));
        if key.path == pattern && is_of_recipe {
            return setting(&Key { path: path.into(), ..key }, values);
        }
    }
    let value = first_value(values);
    shell_quote(&format!("{path}={value}"))
}

/// Returns the argument of `--set` that gives `key` the values that were typed.
fn setting(key: &Key, values: &[&str]) -> String {
    let are_numbers = values.iter().all(|value| value.parse::<f64>().is_ok());
    let is_list = key.form.starts_with("list, [") || (key.form.starts_with('[') && values.len() > 1);
    let is_switch = key.form == "true or false";
    match values {
        [] if is_switch => key.setting("true"),
        [] => key.setting(VALUE),
        _ if is_list && are_numbers => key.setting(&format!("[{}]", values.join(","))),
        // Python writes True and False.
        [first, ..] if is_switch => key.setting(&first.to_lowercase()),
        [first, ..] => key.setting(first),
    }
}

/// Answers an argument without a flag.
fn answer_argument(word: &str, called: &Called<'_>, recipes: &[&str]) -> Option<String> {
    let answer = if word.contains('=') && called.takes_settings() {
        answer_setting(word, called).unwrap_or_else(|| format!("use --set {}", shell_quote(word)))
    } else if let Some(name) = flag_of_path(word, called) {
        format!("use --{name} {}", shell_quote(word))
    } else {
        let names = nearest_recipes(word, recipes);
        let name = names.first().filter(|_| called.has_flag("recipe"))?;
        if names.len() > 1 {
            format!("use --recipe {}", list(&names))
        } else {
            format!("use --recipe {name}")
        }
    };
    Some(format!("`{}` takes no argument {word} without a flag: {answer}", called.full_name()))
}

/// Returns the flag of the command that takes the path `word`, if there is such a file or folder.
fn flag_of_path(word: &str, called: &Called<'_>) -> Option<&'static str> {
    let path = Path::new(word);
    if !path.exists() {
        return None;
    }
    if Plan::path_in(path).is_file() {
        return called.first_flag("checkpoint workdir");
    }
    if has_extension(word, &["toml"]) {
        return called.first_flag("recipe");
    }
    if has_extension(word, &WEIGHT_EXTENSIONS) {
        return called.first_flag("checkpoint init");
    }
    called.first_flag("shards images train")
}

fn has_extension(path: &str, extensions: &[&str]) -> bool {
    let extension = Path::new(path).extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| extensions.contains(&extension))
}

/// Answers a command that `called` does not have.
fn answer_command(word: &str, called: &Called<'_>, program: &Command, recipes: &[&str]) -> Option<String> {
    let name = word.replace('_', "-").to_lowercase();
    let mut answer = None;
    for guess in COMMANDS.iter().filter(|guess| guess.within == called.name) {
        if lists(guess.names, " ", &name) {
            answer = Some(guess.answer.to_string());
        }
    }
    let answer = answer
        .or_else(|| answer_recipe_command(word, called, program, recipes))
        .or_else(|| command_within(&name, program))?;
    let typed = format!("{} {word}", called.full_name());
    Some(format!("`{typed}` is no command: {answer}"))
}

/// Answers the name of a recipe, or of a key, in place of a command.
fn answer_recipe_command(
    word: &str,
    called: &Called<'_>,
    program: &Command,
    recipes: &[&str],
) -> Option<String> {
    let names = nearest_recipes(word, recipes);
    match (called.name.as_str(), names.as_slice()) {
        ("recipe", []) => {
            let is_key = !keys_named(word).is_empty() || keys().iter().any(|key| key.path.starts_with(word));
            is_key.then(|| format!("use `ocelli recipe keys {word}`"))
        }
        ("recipe", [name]) => Some(format!("use `ocelli recipe show {name}`")),
        ("recipe", names) => Some(format!("use `ocelli recipe show NAME`, with {}", list(names))),
        // A misspelled command is none of them.
        ("", [name]) if program.find_subcommand(name).is_some() => None,
        ("", [name]) => {
            Some(format!("use `ocelli pretrain --recipe {name} --shards FOLDER --workdir FOLDER`"))
        }
        ("", [_, ..]) => Some(format!("use `ocelli pretrain --recipe NAME`, with {}", list(&names))),
        _ => None,
    }
}

/// Returns the command of this name within another command.
fn command_within(name: &str, program: &Command) -> Option<String> {
    for command in program.get_subcommands().filter(|command| command.get_name() != "help") {
        if let Some(found) = command.find_subcommand(name) {
            return Some(format!("use `ocelli {} {}`", command.get_name(), found.get_name()));
        }
    }
    None
}

/// Says what the flags that are missing expect; `None` if that is not known of all of them.
fn answer_missing(error: &clap::Error, called: &Called<'_>) -> Option<String> {
    let ContextValue::Strings(missing) = error.get(ContextKind::InvalidArg)? else { return None };
    let mut lines = Vec::new();
    for flag in missing {
        // An alternative is written as `<--checkpoint <CHECKPOINT>|--watch <WORKDIR>>`.
        let name = flag.trim_start_matches('<').strip_prefix("--")?.split([' ', '|', '>']).next()?;
        let mut needs = NEEDS.iter().filter(|need| need.flag == name);
        let need = needs.find(|need| is_for(need.commands, called))?;
        lines.push(format!("--{name}: {}", need.words));
    }
    match lines.as_slice() {
        [] => None,
        [line] => Some(format!("`{}` needs {line}", called.full_name())),
        lines => Some(format!("`{}` needs\n  {}", called.full_name(), lines.join("\n  "))),
    }
}

/// Names the value nearest to a value that a flag does not accept, if the error lists those that it
/// accepts.
fn answer_value(error: &clap::Error) -> Option<String> {
    let flag = text_of(error, ContextKind::InvalidArg)?;
    let value = text_of(error, ContextKind::InvalidValue)?;
    let source = error.source()?.to_string();
    let (_, accepted) = source.split_once("one of ")?;
    let nearest = nearest(&value.to_lowercase(), accepted.split(", "))?;
    let name = flag.split(' ').next()?;
    Some(format!("{name} {value}: did you mean {nearest}? expected one of {accepted}"))
}

/// Checks the keys of `overrides`, settings of the form `optim.lr=1e-3`: returns an answer for the
/// first whose key no recipe has, if it is known in other tools or in another section. They are for
/// the recipe called `name`, whose text is `text`.
pub(crate) fn answer_settings(overrides: &[String], name: &str, text: &str) -> Option<String> {
    let unknown: Vec<&String> = overrides.iter().filter(|entry| unknown_key(entry).is_some()).collect();
    if unknown.is_empty() {
        return None;
    }
    // Which command has the settings does not matter.
    let command = Command::new("pretrain");
    let recipe = RecipeKeys::read(name, text);
    let called = Called { command: &command, name: String::new(), rest: &[], recipe };
    for entry in unknown {
        if let Some(answer) = answer_setting(entry, &called) {
            let path = unknown_key(entry)?;
            return Some(format!("--set {entry}: no key is called {path}; {answer}"));
        }
    }
    None
}

/// Returns the path of the key of a setting that no recipe has.
fn unknown_key(entry: &str) -> Option<&str> {
    let (path, _) = entry.split_once('=')?;
    let path = path.trim();
    if is_key(path) { None } else { Some(path) }
}

/// Answers a setting with an unknown key; `None` if the key exists, or nothing is known of it.
fn answer_setting(entry: &str, called: &Called<'_>) -> Option<String> {
    let path = unknown_key(entry)?;
    let (_, value) = entry.split_once('=')?;
    let typed = path.rsplit('.').next()?;
    answer_key(&UnknownFlag { typed, values: vec![value] }, called)
}

/// Returns whether a recipe may have a key or a section at `path`, in which entries of lists are
/// numbered.
fn is_key(path: &str) -> bool {
    let pattern = pattern_of(path);
    keys().iter().any(|key| is_within(&pattern, &key.path) || is_within(&key.path, &pattern))
}

/// Returns the keys at `path`, which may end in a unit of length.
fn keys_at(path: &str) -> Vec<Key> {
    let pattern = pattern_of(path);
    let mut found = keys();
    found.retain(|key| key.path == pattern || is_length_of(&pattern, key));
    found
}

/// Returns whether `path` is that of a length, `key`, with a unit.
fn is_length_of(path: &str, key: &Key) -> bool {
    let unit = path.strip_prefix(&key.path).and_then(|rest| rest.strip_prefix('.'));
    unit.is_some_and(|unit| key.form.starts_with("length of time") && key.form.contains(unit))
}

/// Returns `path` with `[]` in place of the numbers of entries of lists.
fn pattern_of(path: &str) -> String {
    let mut pattern = String::new();
    for part in path.split('.') {
        if part.parse::<usize>().is_ok() {
            pattern.push_str("[]");
        } else {
            if !pattern.is_empty() {
                pattern.push('.');
            }
            pattern.push_str(part);
        }
    }
    pattern
}

/// Returns whether `path` is `outer` or within it.
fn is_within(path: &str, outer: &str) -> bool {
    let rest = path.strip_prefix(outer);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Returns the path of the key that other tools call `name`, without a unit of length.
pub(crate) fn key_called(name: &str) -> Option<&'static str> {
    let guess = key_guess(&plain_name(name))?;
    let path = guess.replacement.paths().split(' ').next()?;
    let is_key = keys().iter().any(|key| key.path == path);
    if is_key { Some(path) } else { path.rsplit_once('.').map(|(path, _)| path) }
}

/// Returns the keys that other tools call `name`, in lower case and with hyphens.
fn key_guess(name: &str) -> Option<&'static FlagGuess> {
    FLAGS.iter().find(|guess| !guess.replacement.paths().is_empty() && lists(guess.names, " ", name))
}

/// Returns the message that there is no recipe `name`, with those that it may mean.
pub(crate) fn unknown_recipe(name: &str, recipes: &[&str]) -> String {
    let n = recipes.len();
    let names = nearest_recipes(name, recipes);
    if names.is_empty() {
        return format!(
            "there is no recipe and no file {name}: `ocelli recipe list` lists the {n} built-in recipes, \
             `ocelli recipe new` prints a new one"
        );
    }
    format!("there is no recipe {name}: did you mean {}? `ocelli recipe list` lists all {n}", list(&names))
}

/// Returns whether `name` is the name of a recipe of another tool, by its extension.
pub(crate) fn is_recipe_of_other_tools(name: &str) -> bool {
    has_extension(name, &OTHER_RECIPES)
}

/// Returns the recipes that `name` may mean: the one that is written differently, those of a
/// family, the most similar ones, or those that contain the name.
fn nearest_recipes<'a>(name: &str, recipes: &[&'a str]) -> Vec<&'a str> {
    let name = name.trim_end_matches(".toml").to_lowercase().replace(['-', ' '], "_");
    let same: Vec<&str> = recipes.iter().copied().filter(|recipe| *recipe == name).collect();
    if !same.is_empty() {
        return same;
    }
    let beginning = format!("{name}_");
    let family: Vec<&str> = recipes.iter().copied().filter(|recipe| recipe.starts_with(&beginning)).collect();
    if !family.is_empty() {
        return family;
    }
    if let Some(similar) = nearest(&name, recipes.iter().copied()) {
        return vec![similar];
    }
    let is_long = name.len() >= 3;
    recipes.iter().copied().filter(|recipe| is_long && recipe.contains(&name)).collect()
}

/// Returns the word of `known` that is most similar to `word`, if it is similar enough.
fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut nearest = None;
    let mut largest = SIMILAR;
    for candidate in known {
        let similarity = strsim::jaro_winkler(candidate, word);
        if similarity > largest {
            nearest = Some(candidate);
            largest = similarity;
        }
    }
    nearest
}

/// Lists names: `a, b or c`.
fn list(names: &[&str]) -> String {
    let shown = &names[..names.len().min(MOST_NAMES)];
    match shown {
        [] => String::new(),
        [name] => (*name).to_string(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::{Cli, read_recipe};

    const RECIPES: [&str; 5] =
        ["dino_cifar", "dino_vits16", "dinov2_cifar", "dinov2_continue", "lejepa_cifar"];

    #[test]
    fn recipes_are_found_by_family_similarity_and_part() {
        assert_eq!(nearest_recipes("dino_cfar", &RECIPES), ["dino_cifar"]);
        assert_eq!(nearest_recipes("dinov2", &RECIPES), ["dinov2_cifar", "dinov2_continue"]);
        assert_eq!(nearest_recipes("DINO-ViTS16", &RECIPES), ["dino_vits16"]);
        assert_eq!(nearest_recipes("vits16", &RECIPES), ["dino_vits16"]);
        assert!(nearest_recipes("mae", &RECIPES).is_empty());
    }

    #[test]
    fn keys_of_lists_and_units_are_known() {
        for path in
            ["optim", "optim.lr", "optim.length.epochs", "views.crops.0.scale.1", "data.mix.web", "model"]
        {
            assert!(is_key(path), "{path}");
        }
        for path in ["lr", "optim.epochs", "train.lr", "optim.l"] {
            assert!(!is_key(path), "{path}");
        }
    }

    /// Returns the answer to a setting of a command whose recipe is not known.
    fn answer_to(entry: &str) -> Option<String> {
        let program = Command::new("ocelli");
        answer_setting(entry, &find_called(&program, &[], read_recipe))
    }

    #[test]
    fn settings_are_answered_with_keys() {
        assert_eq!(answer_to("epochs=3").as_deref(), Some("use --set optim.length.epochs=3"));
        assert_eq!(answer_to("lr=1").as_deref(), Some("use --set optim.lr=1"));
        assert_eq!(answer_to("optim.lr=1"), None);
        let answer = answer_to("train.batch_size_per_gpu=8").unwrap();
        assert!(answer.starts_with("use --set optim.batch_size=8 on one rank"), "{answer}");
        let answer = answer_to("workers=1").unwrap();
        assert_eq!(answer, "use --set run.workers=1 or --set run.data_threads=1");
    }

    /// Returns the answer to a command line that is wrong.
    fn answer_to_words(words: &[&str]) -> String {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let mut program = Cli::command();
        program.build();
        let error = Cli::try_parse_from(&words).err().unwrap();
        answer_usage(&error, &words, &program, &RECIPES, read_recipe).unwrap()
    }

    /// Values are typed as a shell needs them, all of them if the flag takes several.
    #[test]
    fn values_are_quoted() {
        let answer = answer_to_words(&["ocelli", "pretrain", "--data", "my photos", "it's.tar"]);
        assert_eq!(answer, r"--data is no flag of `ocelli pretrain`: use --shards 'my photos' 'it'\''s.tar'");
        let answer = answer_to_words(&["ocelli", "pretrain", "--output", "a b", "c"]);
        assert_eq!(answer, "--output is no flag of `ocelli pretrain`: use --workdir 'a b'");
        let answer = answer_to_words(&["ocelli", "shards", "stats", "--data", "a b", "c"]);
        assert!(answer.ends_with("it is given without a flag: `ocelli shards stats 'a b' c`"), "{answer}");
        let answer = answer_to_words(&["ocelli", "export", "--force", "true"]);
        assert_eq!(answer, "--force is no flag of `ocelli export`: use --overwrite");
    }

    /// Every key of the table exists, and a pair has two numbers.
    #[test]
    fn keys_of_the_table_exist() {
        for guess in FLAGS {
            let paths = guess.replacement.paths();
            for path in paths.split(' ').filter(|path| !path.is_empty()) {
                let found = keys_at(path);
                assert!(!found.is_empty(), "{path}");
                let is_pair = matches!(guess.replacement, Replacement::Pair(_));
                assert!(!is_pair || found.iter().all(|key| key.form == "[number, number]"), "{path}");
            }
        }
    }

    /// Names are written as they are looked up, and none stands twice where the first answer would
    /// hide the second: for one command, for all, or as a key.
    #[test]
    fn names_of_the_table_are_unique() {
        let mut seen = HashSet::new();
        let mut key_names = HashSet::new();
        for guess in FLAGS {
            for name in guess.names.split(' ') {
                assert!(!name.is_empty() && name == plain_name(name), "{name}");
                for command in guess.commands.split(", ") {
                    assert!(seen.insert((name, command)), "{name} stands twice for {command:?}");
                }
                let is_key = !guess.replacement.paths().is_empty();
                assert!(!is_key || key_names.insert(name), "{name} is two keys");
            }
        }
    }

    /// Every command that the table names exists.
    #[test]
    fn commands_of_the_table_exist() {
        let mut program = Cli::command();
        program.build();
        for guess in FLAGS {
            let commands = guess.commands.split(", ").filter(|command| !command.is_empty());
            for command in commands {
                let line = format!("ocelli {command}");
                let words: Vec<String> = line.split(' ').map(str::to_string).collect();
                assert_eq!(find_called(&program, &words, read_recipe).name, command);
            }
        }
    }
}
