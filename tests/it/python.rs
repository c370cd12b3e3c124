//! The Python module, which runs commands of the program within the Python process.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::libraries::python;
use crate::support::{World, json_of, metrics, ok, program, wait_for, wait_for_end};

/// A folder with the module `ocelli`, as the wheel has it.
pub(crate) struct Module {
    pub(crate) folder: tempfile::TempDir,
    python: PathBuf,
}

impl Module {
    /// Returns the module, or prints the reason and returns `None` if there is no Python with
    /// NumPy.
    pub(crate) fn new() -> Option<Self> {
        let python = python("numpy")?;
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("ocelli");
        std::fs::create_dir(&package).unwrap();
        let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/python/ocelli");
        for entry in std::fs::read_dir(sources).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "py") {
                std::fs::copy(&path, package.join(path.file_name().unwrap())).unwrap();
            }
        }
        // Cargo builds it beside this test, which depends on it.
        let library = format!("{DLL_PREFIX}_ocelli{DLL_SUFFIX}");
        let library = std::env::current_exe().unwrap().with_file_name(library);
        std::fs::copy(library, package.join("_ocelli.abi3.so")).unwrap();
        Some(Self { folder, python })
    }

    /// Prepares Python with `code`.
    fn command(&self, world: &World, code: &str) -> Command {
        let mut command = Command::new(&self.python);
        command.args(["-c", code]).current_dir(world.folder.path());
        command.env("PYTHONPATH", self.folder.path());
        command.env("OCELLI_CACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
        command
    }

    /// Runs `code`, which must succeed, and returns its output.
    fn run(&self, world: &World, code: &str) -> String {
        self.run_with_messages(world, code).0
    }

    /// Runs `code`, which must succeed, and returns its output and its messages.
    fn run_with_messages(&self, world: &World, code: &str) -> (String, String) {
        let output = self.command(world, code).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{stderr}");
        (String::from_utf8(output.stdout).unwrap(), stderr)
    }
}

/// Start of a program: a run of a few steps.
const START: &str = r"import ocelli
settings = {'optim.length': {'steps': 4}, 'run': {'workers': 1, 'log_every_steps': 1}}
";

#[test]
fn a_run_in_python_has_the_metrics_of_the_program_as_arrays() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let code = format!(
        r"{START}
run = ocelli.pretrain('tiny.toml', 'data/train-000000.tar', 'run', settings=settings, show_progress=False)
metrics = run.metrics
assert run.steps == 4 and run['steps'] == 4, run
assert metrics['step'].tolist() == [0, 1, 2, 3], metrics['step']
assert metrics['train/loss'].dtype == 'float64'
print(metrics['train/loss'].tolist())
rows = ocelli.runs('.')
assert len(rows) == 1, rows
"
    );
    let losses: Vec<f64> = serde_json::from_str(module.run(&world, &code).trim()).unwrap();
    let sets = ["optim.length={steps=4}", "run.workers=1", "run.log_every_steps=1"];
    ok(&world.pretrain("program", &sets.map(|set| ["--set", set]).concat()));
    let rows = metrics(&world.path("program"));
    let expected: Vec<f64> = rows.iter().map(|row| row["train/loss"].as_f64().unwrap()).collect();
    assert_eq!(losses, expected, "the same run in Python and in the program");
}

#[test]
fn an_error_in_python_has_the_text_of_the_program_and_leaves_the_process_alive() {
    let Some(module) = Module::new() else { return };
    let world = World::new(4);
    let code = format!(
        r"{START}
for attempt in range(2):
    try:
        ocelli.pretrain('no_such_recipe', 'data/train-000000.tar', 'run')
    except RuntimeError as error:
        assert type(error) is ocelli.ConfigurationError and error.exit_code == 2
        print(error)
"
    );
    let (output, messages) = module.run_with_messages(&world, &code);
    assert_eq!(messages, "", "the text of an error is that of the exception, and no message");
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines.len(), 2, "{output}");
    let args =
        ["pretrain", "--recipe", "no_such_recipe", "--shards", "data/train-000000.tar", "--workdir", "run"];
    let program = program().args(args).current_dir(world.folder.path()).output().unwrap();
    let stderr = String::from_utf8(program.stderr).unwrap();
    assert_eq!(stderr.trim(), format!("error: {}", lines[0]));
    assert_eq!(lines[0], lines[1]);
}

#[test]
fn an_interrupt_in_python_saves_a_checkpoint_and_raises_keyboard_interrupt() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let code = format!(
        r"{START}
settings['optim.length'] = {{'steps': 100000}}
try:
    ocelli.pretrain('tiny.toml', 'data/train-000000.tar', 'run', settings=settings, show_progress=False)
except KeyboardInterrupt:
    print('interrupted')
print(len(ocelli.runs('.')))
"
    );
    let mut child =
        module.command(&world, &code).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let metrics = world.path("run/metrics.jsonl");
    wait_for("the first step", Duration::from_secs(120), || {
        assert!(child.try_wait().unwrap().is_none(), "Python ended before the first step");
        std::fs::metadata(&metrics).is_ok_and(|file| file.len() > 0)
    });
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    wait_for_end(&mut child);
    let output = child.wait_with_output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(stdout, "interrupted\n1\n", "{}", String::from_utf8_lossy(&output.stderr));
    assert!(has_checkpoint(&world.path("run")));
}

/// A command that does not train is given up at once: the interrupt is raised while it still reads.
#[test]
fn an_interrupt_of_another_command_is_raised_at_once() {
    let Some(module) = Module::new() else { return };
    let world = World::new(4);
    let code = r"import os, signal, threading, ocelli
threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    ocelli._run('bench', 'loader', 'pipe:sleep 60')
except KeyboardInterrupt:
    print('interrupted', flush=True)
    os._exit(0)
";
    let started = Instant::now();
    assert_eq!(module.run(&world, code), "interrupted\n");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
}

/// Values of Python are those of the recipe that the same TOML gives.
#[test]
fn settings_in_python_become_toml() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let code = r#"import ocelli, numpy, pathlib
settings = {
    'name': 'a "quoted" name', 'seed': numpy.int64(5),
    'optim': {'lr': 0.003, 'betas': (0.9, 0.99), 'length': {'steps': 2}},
    'data.normalization': {'mean': numpy.array([0.5, 0.25, 0.5]), 'std': [0.25] * 3},
    'optim.decay_vectors': True, 'optim.warmup': '{ percent = 50 }',
    'run.workers': 1,
}
ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)
try:
    ocelli.pretrain('tiny.toml', 'data', 'run', settings={'optim.lr': None})
except TypeError as error:
    print(error)
"#;
    let output = module.run(&world, code);
    assert!(output.starts_with("settings: optim.lr is None"), "{output}");
    let plan = std::fs::read_to_string(world.path("run/plan.toml")).unwrap();
    let plan: toml::Table = plan.parse().unwrap();
    let recipe = &plan["recipe"];
    assert_eq!(recipe["name"].as_str(), Some("a \"quoted\" name"));
    assert_eq!(recipe["seed"].as_integer(), Some(5));
    let optim = &recipe["optim"];
    assert_eq!(optim["lr"].as_float(), Some(0.003));
    assert_eq!(optim["betas"], toml::Value::from(vec![0.9, 0.99]));
    assert_eq!(optim["length"]["steps"].as_integer(), Some(2));
    assert_eq!(optim["warmup"]["percent"].as_float(), Some(50.0));
    assert_eq!(optim["decay_vectors"].as_bool(), Some(true));
    assert_eq!(recipe["data"]["normalization"]["mean"], toml::Value::from(vec![0.5, 0.25, 0.5]));
}

/// Each kind of failure is a class of its own, with the exit code of the program.
#[test]
fn errors_in_python_have_the_kind_and_the_code_of_the_program() {
    let Some(module) = Module::new() else { return };
    let world = World::new(4);
    let code = format!(
        r"{START}
failures = [
    (ocelli.ConfigurationError, 2, lambda: ocelli.pretrain('tiny.toml', 'nowhere.tar', 'run')),
    (ocelli.ConfigurationError, 2, lambda: ocelli.pretrain('tiny.toml', 'data', 'run', '--no-such-flag')),
    (ocelli.NotFiniteError, 78, lambda: ocelli.pretrain(
        'tiny.toml', 'data', 'nan', '--inject-fault', 'nan:rank=0,step=0', settings={{'optim.length': {{'steps': 1}}}})),
    (ocelli.DataError, 3, lambda: ocelli._run('shards', 'verify', 'cut.tar')),
]
open('cut.tar', 'wb').write(open('data/train-000000.tar', 'rb').read()[:4096])
for kind, code, fail in failures:
    try:
        fail()
    except ocelli.Error as error:
        assert type(error) is kind and error.exit_code == code, (kind, error)
        assert isinstance(error, RuntimeError) and str(error), kind
        print(kind.__name__)
"
    );
    let output = module.run(&world, &code);
    assert_eq!(output, "ConfigurationError\nConfigurationError\nNotFiniteError\nDataError\n");
}

/// Value of red, green or blue of image `i` at a pixel.
fn value(i: u32, x: u32, y: u32, channel: u32) -> u8 {
    ((i * 37 + x * 11 + y * 7 + channel * 50) % 256) as u8
}

/// Images in memory have the features of the same images in files.
#[test]
fn arrays_and_pil_images_are_embedded_like_files() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    for i in 0..3 {
        let image = image::ImageBuffer::from_fn(20, 18, |x, y| {
            image::Rgb([value(i, x, y, 0), value(i, x, y, 1), value(i, x, y, 2)])
        });
        image.save(world.path(&format!("{i}.png"))).unwrap();
    }
    let code = format!(
        r"{START}
import numpy
settings['optim.length'] = {{'steps': 1}}
run = ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)
i, y, x, c = numpy.indices((3, 18, 20, 3))
array = ((i * 37 + x * 11 + y * 7 + c * 50) % 256).astype('uint8')
features, names = ocelli.embed(run, ['0.png', '1.png', '2.png'])
assert [name.rsplit('/', 1)[-1] for name in names] == ['0.png', '1.png', '2.png'], names
assert features.shape == (3, 32) and len(numpy.unique(features, axis=0)) == 3
for images in [array, list(array), [array[0], '1.png', array[2]]]:
    other, names = ocelli.embed(run, images, show_progress=False)
    assert (other == features).all()
    assert (names[0], names[2]) == ('0', '2'), names
one, names = ocelli.embed(run, array[1])
assert (one == features[1:2]).all() and names == ['0'], names
assert (ocelli.embed(run, '1.png')[0] == features[1:2]).all()
assert len(ocelli.embed(run, 'data')[1]) == 24
try:
    from PIL import Image
except ImportError:
    Image = None
if Image:
    other, names = ocelli.embed(run, [Image.fromarray(image) for image in array])
    assert (other == features).all() and names == ['0', '1', '2'], names
other, names = ocelli.embed(run, numpy.array(['0.png', '2.png']))
assert (other == features[[0, 2]]).all()
"
    );
    module.run(&world, &code);
}

/// A folder is images if it has any, and else shards; a path that exists is no pattern.
#[test]
fn a_folder_of_images_is_not_taken_for_shards() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    world.extract("files");
    let code = format!(
        r"{START}
import pathlib, shutil, warnings
settings['optim.length'] = {{'steps': 1}}
run = ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)
images = sorted(pathlib.Path('files/train-000000').glob('*.jpg'))
shard = 'data/train-000000.tar'
for folder, n in [('mixed/cat', 5), ('ph {{a}}', 3)]:
    pathlib.Path(folder).mkdir(parents=True)
    for image in images[:n]:
        shutil.copy(image, folder)
shutil.copy(shard, 'mixed/backup.tar')
shutil.copy(images[0], 'one {{a}}.jpg')
def n_rows(images):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        features, names = ocelli.embed(run, images, show_progress=False)
    assert len(features) == len(names), names
    for warning in caught:
        assert warning.filename == '<string>', warning
    return len(names), [str(warning.message) for warning in caught]
n, warned = n_rows('mixed')
assert n == 5 and len(warned) == 1 and 'backup.tar' in warned[0], (n, warned)
assert n_rows('ph {{a}}') == (3, [])
assert n_rows('one {{a}}.jpg') == (1, [])
for shards in ['data', shard, 'mixed/backup.tar', 'data/train-{{000000..000000}}.tar', 'data/*.tar']:
    assert n_rows(shards) == (24, []), shards
shutil.copy(images[0], 'data/pairs.png')
assert n_rows('data') == (24, []), 'a picture of the program is not an image'
print(sorted(ocelli._images._IMAGES))
"
    );
    let output = module.run(&world, &code);
    for extension in pipeline::shard::IMAGE_EXTENSIONS {
        let is_known = output.contains(&format!("'.{extension}'"));
        // An array may be features, and the others are extensions after a point in the name.
        assert!(is_known || extension == "npy" || extension.contains('.'), "{extension}: {output}");
    }
}

/// Images without a row are named by a warning of Python, with the reason.
#[test]
fn images_that_cannot_be_used_are_named_by_a_warning() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    world.extract("files");
    let code = format!(
        r"{START}
import glob, warnings
settings['optim.length'] = {{'steps': 1}}
run = ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)
images = sorted(glob.glob('files/train-000000/*.jpg'))
open('text.png', 'w').write('no image')
def warned(images):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        features, names = ocelli.embed(run, images, show_progress=False)
    assert len(features) == len(names) == 2, names
    return [str(warning.message) for warning in caught]
assert warned(images[:2]) == []
message, = warned([images[0], 'nope.png', images[1], 'text.png'])
assert message.startswith('2 unusable images without a row: '), message
assert 'nope.png (it is missing), ' in message and 'text.png (cannot decode' in message, message
message, = warned(images[:2] + [f'gone{{i}}.png' for i in range(9)])
assert 'gone4.png' in message and message.endswith(', and 4 more'), message
"
    );
    module.run(&world, &code);
}

/// An image of PIL with 16 bits has the features of its file. One whose range is not known is
/// refused.
#[test]
fn pil_images_of_more_than_8_bits_are_embedded_like_files_or_refused() {
    let Some(module) = Module::new() else { return };
    if python("PIL").is_none() {
        return;
    }
    let world = World::new(24);
    let image = image::ImageBuffer::from_fn(20, 18, |x, y| image::Luma([(x * 3_000 + y * 300) as u16]));
    image.save(world.path("deep.png")).unwrap();
    let code = format!(
        r"{START}
import numpy
from PIL import Image
settings['optim.length'] = {{'steps': 1}}
run = ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)
y, x = numpy.indices((18, 20))
image = Image.fromarray((x * 3000 + y * 300).astype('uint16'))
assert image.mode == 'I;16', image.mode
features, names = ocelli.embed(run, 'deep.png')
assert (ocelli.embed(run, [image])[0] == features).all()
for mode in ['I', 'F']:
    try:
        ocelli.embed(run, [image.convert(mode)])
        raise AssertionError(mode)
    except TypeError as error:
        assert f'of mode {{mode}}' in str(error) and 'embed the file' in str(error), error
"
    );
    module.run(&world, &code);
}

/// The error about arrays of other shapes and types names what came, and an expression that repairs
/// it.
#[test]
fn arrays_of_other_shapes_and_types_are_refused_with_what_to_do() {
    let Some(module) = Module::new() else { return };
    let world = World::new(4);
    let code = r"import numpy, ocelli
def refused(images):
    try:
        ocelli.embed('run', images)
    except (TypeError, ValueError) as error:
        return str(error)
images = numpy.zeros((4, 32, 30, 3), 'uint8')
gray = images[..., 0]
planes = images.transpose(0, 3, 1, 2)
cases = [
    (planes, 'uint8 of shape [4, 3, 32, 30]', 'images.transpose(0, 2, 3, 1)'),
    (planes[0], 'uint8 of shape [3, 32, 30]', 'images.transpose(1, 2, 0)'),
    (gray, 'uint8 of shape [4, 32, 30]', 'numpy.stack([images] * 3, axis=-1)'),
    (gray[0], 'uint8 of shape [32, 30]', 'numpy.stack([images] * 3, axis=-1)'),
    (gray[:, None], 'uint8 of shape [4, 1, 32, 30]', 'numpy.stack([images[:, 0]] * 3, axis=-1)'),
    (gray[..., None], 'uint8 of shape [4, 32, 30, 1]', 'numpy.repeat(images, 3, axis=-1)'),
    (images / 255, 'float64 of shape [4, 32, 30, 3]', '(255 * images).round().astype(\'uint8\')'),
    (images.astype('uint16'), 'uint16 of shape', '(images >> 8).astype(\'uint8\')'),
]
for wrong, what, remedy in cases:
    message = refused(wrong)
    assert '[N, H, W, 3]' in message and 'images is ' + what in message and remedy in message, message
    ocelli._images.checked_array(eval(remedy, {'images': wrong, 'numpy': numpy}), 'images')
assert 'numpy.stack([images[1]] * 3' in refused([images[0], gray[0]])
assert 'images[0] must be one image' in refused([images])
assert 'images[1] is None' in refused(['0.png', None])
assert 'images[0] is 0.5' in refused(numpy.array([0.5]))
assert refused([]) == 'images is empty'
";
    module.run(&world, code);
}

/// Paths come as a list, or as a column of a data frame, which is no list but becomes one.
#[test]
fn columns_of_paths_are_lists_of_paths() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let code = format!(
        r"{START}
import numpy, pathlib
class Column:
    ndim = 1
    def __init__(self, values):
        self.values, self.shape = values, (len(values),)
    def tolist(self):
        return list(self.values)
shard = 'data/train-000000.tar'
columns = [[shard], Column([shard]), numpy.array([shard]), numpy.array([pathlib.Path(shard)])]
for i, images in enumerate(columns):
    ocelli.pretrain('tiny.toml', images, f'run{{i}}', settings=settings, show_progress=False)
def refused(images):
    try:
        ocelli.pretrain('tiny.toml', images, 'other')
    except TypeError as error:
        return str(error)
assert 'images[1] is nan' in refused(Column([shard, float('nan')]))
assert 'only ocelli.embed takes images in memory' in refused(numpy.zeros((2, 8, 8, 3), 'uint8'))
try:
    import pandas
except ImportError:
    pandas = None
if pandas:
    ocelli.pretrain('tiny.toml', pandas.Series([shard]), 'series', settings=settings, show_progress=False)
"
    );
    module.run(&world, &code);
}

/// A run is scored, exported, put on a page and listed; the numbers are those of the program.
#[test]
fn a_run_in_python_is_scored_exported_reported_and_listed() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let code = format!(
        r"{START}
import json
run = ocelli.pretrain('tiny.toml', 'data', 'runs/a', settings=settings, show_progress=False)
scores = ocelli.probe(run, 'data', ['data/train-000000.tar'], protocols=['knn'], baseline=True)
networks = scores['networks']
assert set(networks) == {{'teacher', 'random_init', 'pixels'}}, networks.keys()
files = ocelli.export(run, 'out/backbone.safetensors', precision='f16')
assert files[0].stat().st_size > 0, files
try:
    ocelli.export(run, 'out/backbone.safetensors')
except ocelli.ConfigurationError as error:
    assert '--overwrite' in str(error)
ocelli.export(run, 'out/backbone.safetensors', overwrite=True)
page = ocelli.report(run, '--no-pictures', out='page.html')
assert page.read_text().startswith('<'), page
page = ocelli.report(checkpoint=run, images='data', out='weights')
assert page.parent.name == 'weights' and page.read_text().startswith('<'), page
assert page == ocelli.report(checkpoint=run, images=['data'], out='weights', overwrite=True)
flags = ['--checkpoint', run, '--images', 'data', '--out', 'flags']
assert ocelli.report([], *flags).name == page.name
listed = ocelli.runs('runs')
assert isinstance(listed, list) and listed[0]['total_steps'] == 4, listed
assert 'finished' in str(listed) and '<td>finished</td>' in listed._repr_html_()
table = ocelli.seed_table('runs')
assert table['rows'][0]['seeds'] == [3], table
assert 'tabular' in ocelli.seed_table('runs', 'latex')
print(ocelli.__version__)
print(json.dumps(networks['teacher']['knn_10']['accuracy']))
"
    );
    let output = module.run(&world, &code);
    let lines: Vec<&str> = output.lines().collect();
    let version = program().arg("--version").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    assert_eq!(version.split(' ').nth(1), Some(lines[0]), "{version}");
    let shard = world.text("data/train-000000.tar");
    let run = world.text("runs/a");
    let args =
        ["probe", "--checkpoint", &run, "--train", &shard, "--test", &shard, "--protocol", "knn", "--json"];
    let scores = json_of(&world.ocelli(&args));
    assert_eq!(scores["networks"]["teacher"]["knn_10"]["accuracy"].to_string(), lines[1]);
}

/// The table has the score of a run with its course, or else its search of views, as in the
/// program.
#[test]
fn the_table_of_runs_in_python_has_the_scores_of_the_program() {
    let Some(module) = Module::new() else { return };
    let world = World::new(80);
    let code = format!(
        r"{START}
ocelli.pretrain('tiny.toml', 'data', 'runs/scored', settings=settings, show_progress=False)
ocelli.probe('runs/scored', None, 'data', '--leave-one-out', protocols='knn', show_progress=False)
settings['optim'] = {{'batch_size': 16, 'length': {{'steps': 400}}}}
del settings['optim.length']
ocelli.pretrain('tiny.toml', 'data', 'runs/views', settings=settings, show_progress=False)
runs = ocelli.runs('runs')
lines = str(runs).splitlines()
scored, views = runs
assert lines[1].count('knn_') == 1 and views['best'] is None, lines
assert 'score: first → best → last' in lines[0], lines
assert ' → ' in views['learning']['course']
program = ocelli._run('runs', 'runs')
scores = [scored['best']['metric'] + ' ' + scored['best']['course'], 'views ' + views['learning']['course']]
for line, score in zip(lines[1:], scores):
    assert score in line and score in program and score in runs._repr_html_(), (score, line, program)
"
    );
    module.run(&world, &code);
}

/// A message is printed once, with its level. In a notebook the line of progress is drawn over
/// itself, and no message is lost in it; elsewhere it is a line of a log.
#[test]
fn messages_in_python_are_shown_once() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let train = r"settings['optim.batch_size'] = 32
ocelli.pretrain('tiny.toml', 'data', workdir, settings=settings, show_progress=show_progress)
";
    const WARNING: &str = "warning: optim.batch_size is 32 but the data set has only 24 images";
    let notebook = "import sys, types\nsys.modules['ipykernel'] = types.ModuleType('ipykernel')\n";
    for (workdir, before, show_progress) in
        [("log", "", "True"), ("live", notebook, "True"), ("quiet", "", "False")]
    {
        let code = format!("{before}{START}workdir, show_progress = '{workdir}', {show_progress}\n{train}");
        let (_, messages) = module.run_with_messages(&world, &code);
        assert_eq!(messages.matches("images repeat within a batch").count(), 1, "{messages}");
        // What a screen shows of each line.
        let seen: Vec<&str> = messages.split('\n').map(|line| line.rsplit('\r').next().unwrap()).collect();
        assert!(seen.iter().any(|line| line.starts_with(WARNING)), "{messages}");
        assert_eq!(messages.contains('\r'), workdir == "live", "{messages}");
        let n_last = seen.iter().filter(|line| line.contains("step 4/4 ")).count();
        assert_eq!(n_last, usize::from(workdir != "quiet"), "{messages}");
        assert_eq!(messages.contains("report: "), workdir != "quiet", "{messages}");
    }
}

/// Without progress, a verbose command still prints its notes, but no line of progress.
#[test]
fn a_verbose_command_in_python_prints_notes_without_progress() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    for flag in ["-v", "--verbose", "--quiet"] {
        let code = format!(
            r"{START}
ocelli.pretrain('tiny.toml', 'data', 'run{flag}', '{flag}', settings=settings, show_progress=False)
"
        );
        let (_, messages) = module.run_with_messages(&world, &code);
        assert_eq!(messages.contains("report: "), flag != "--quiet", "{flag}: {messages}");
        assert!(!messages.contains("step 4/4 "), "{flag}: {messages}");
    }
}

/// Returns whether the run in `workdir` has a checkpoint.
fn has_checkpoint(workdir: &Path) -> bool {
    workdir.join("checkpoints/latest").exists()
}
