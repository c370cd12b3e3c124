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
const START: &str = "import ocelli\n\
    settings = {'optim.length': {'steps': 4}, 'run': {'workers': 1, 'log_every_steps': 1}}\n";

#[test]
fn a_run_in_python_has_the_metrics_of_the_program_as_arrays() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let code = format!(
        "{START}\
         run = ocelli.pretrain('tiny.toml', 'data/train-000000.tar', 'run', settings=settings, show_progress=False)\n\
         metrics = run.metrics\n\
         assert run.steps == 4 and run['steps'] == 4, run\n\
         assert metrics['step'].tolist() == [0, 1, 2, 3], metrics['step']\n\
         assert metrics['train/loss'].dtype == 'float64'\n\
         print(metrics['train/loss'].tolist())\n\
         rows = ocelli.runs('.')\n\
         assert len(rows) == 1, rows\n"
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
        "{START}\
         for attempt in range(2):\n    \
             try:\n        \
                 ocelli.pretrain('no_such_recipe', 'data/train-000000.tar', 'run')\n    \
             except RuntimeError as error:\n        \
                 assert type(error) is ocelli.ConfigurationError and error.exit_code == 2\n        \
                 print(error)\n"
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
        "{START}\
         settings['optim.length'] = {{'steps': 100000}}\n\
         try:\n    \
             ocelli.pretrain('tiny.toml', 'data/train-000000.tar', 'run', settings=settings, show_progress=False)\n\
         except KeyboardInterrupt:\n    \
             print('interrupted')\n\
         print(len(ocelli.runs('.')))\n"
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
    let code = "import os, signal, threading, ocelli\n\
         threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n\
         try:\n    \
             ocelli._run('bench', 'loader', 'pipe:sleep 60')\n\
         except KeyboardInterrupt:\n    \
             print('interrupted', flush=True)\n    \
             os._exit(0)\n";
    let started = Instant::now();
    assert_eq!(module.run(&world, code), "interrupted\n");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
}

/// Values of Python are those of the recipe that the same TOML gives.
#[test]
fn settings_in_python_become_toml() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let code = "import ocelli, numpy, pathlib\n\
         settings = {\n    \
             'name': 'a \"quoted\" name', 'seed': numpy.int64(5),\n    \
             'optim': {'lr': 0.003, 'betas': (0.9, 0.99), 'length': {'steps': 2}},\n    \
             'data.normalization': {'mean': numpy.array([0.5, 0.25, 0.5]), 'std': [0.25] * 3},\n    \
             'optim.decay_vectors': True, 'optim.warmup': '{ percent = 50 }',\n    \
             'run.workers': 1,\n\
         }\n\
         ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)\n\
         try:\n    \
             ocelli.pretrain('tiny.toml', 'data', 'run', settings={'optim.lr': None})\n\
         except TypeError as error:\n    \
             print(error)\n";
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
        "{START}\
         failures = [\n    \
             (ocelli.ConfigurationError, 2, lambda: ocelli.pretrain('tiny.toml', 'nowhere.tar', 'run')),\n    \
             (ocelli.ConfigurationError, 2, lambda: ocelli.pretrain('tiny.toml', 'data', 'run', '--no-such-flag')),\n    \
             (ocelli.NotFiniteError, 78, lambda: ocelli.pretrain('tiny.toml', 'data', 'nan', '--inject-fault', \
             'nan:rank=0,step=0', settings={{'optim.length': {{'steps': 1}}}})),\n    \
             (ocelli.DataError, 3, lambda: ocelli._run('shards', 'verify', 'cut.tar')),\n\
         ]\n\
         open('cut.tar', 'wb').write(open('data/train-000000.tar', 'rb').read()[:4096])\n\
         for kind, code, fail in failures:\n    \
             try:\n        \
                 fail()\n    \
             except ocelli.Error as error:\n        \
                 assert type(error) is kind and error.exit_code == code, (kind, error)\n        \
                 assert isinstance(error, RuntimeError) and str(error), kind\n        \
                 print(kind.__name__)\n"
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
        "{START}\
         import numpy\n\
         settings['optim.length'] = {{'steps': 1}}\n\
         run = ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)\n\
         i, y, x, c = numpy.indices((3, 18, 20, 3))\n\
         array = ((i * 37 + x * 11 + y * 7 + c * 50) % 256).astype('uint8')\n\
         features, names = ocelli.embed(run, ['0.png', '1.png', '2.png'])\n\
         assert [name.rsplit('/', 1)[-1] for name in names] == ['0.png', '1.png', '2.png'], names\n\
         assert features.shape == (3, 32) and len(numpy.unique(features, axis=0)) == 3\n\
         for images in [array, list(array), [array[0], '1.png', array[2]]]:\n    \
             other, names = ocelli.embed(run, images, show_progress=False)\n    \
             assert (other == features).all()\n    \
             assert (names[0], names[2]) == ('0', '2'), names\n\
         one, names = ocelli.embed(run, array[1])\n\
         assert (one == features[1:2]).all() and names == ['0'], names\n\
         assert (ocelli.embed(run, '1.png')[0] == features[1:2]).all()\n\
         assert len(ocelli.embed(run, 'data')[1]) == 24\n\
         try:\n    \
             from PIL import Image\n\
         except ImportError:\n    \
             Image = None\n\
         if Image:\n    \
             other, names = ocelli.embed(run, [Image.fromarray(image) for image in array])\n    \
             assert (other == features).all() and names == ['0', '1', '2'], names\n\
         other, names = ocelli.embed(run, numpy.array(['0.png', '2.png']))\n\
         assert (other == features[[0, 2]]).all()\n"
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
        "{START}\
         import pathlib, shutil, warnings\n\
         settings['optim.length'] = {{'steps': 1}}\n\
         run = ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)\n\
         images = sorted(pathlib.Path('files/train-000000').glob('*.jpg'))\n\
         shard = 'data/train-000000.tar'\n\
         for folder, n in [('mixed/cat', 5), ('ph {{a}}', 3)]:\n    \
             pathlib.Path(folder).mkdir(parents=True)\n    \
             for image in images[:n]:\n        \
                 shutil.copy(image, folder)\n\
         shutil.copy(shard, 'mixed/backup.tar')\n\
         shutil.copy(images[0], 'one {{a}}.jpg')\n\
         def n_rows(images):\n    \
             with warnings.catch_warnings(record=True) as caught:\n        \
                 warnings.simplefilter('always')\n        \
                 features, names = ocelli.embed(run, images, show_progress=False)\n    \
             assert len(features) == len(names), names\n    \
             for warning in caught:\n        \
                 assert warning.filename == '<string>', warning\n    \
             return len(names), [str(warning.message) for warning in caught]\n\
         n, warned = n_rows('mixed')\n\
         assert n == 5 and len(warned) == 1 and 'backup.tar' in warned[0], (n, warned)\n\
         assert n_rows('ph {{a}}') == (3, [])\n\
         assert n_rows('one {{a}}.jpg') == (1, [])\n\
         for shards in ['data', shard, 'mixed/backup.tar', 'data/train-{{000000..000000}}.tar', 'data/*.tar']:\n    \
             assert n_rows(shards) == (24, []), shards\n\
         shutil.copy(images[0], 'data/pairs.png')\n\
         assert n_rows('data') == (24, []), 'a picture of the program is not an image'\n\
         print(sorted(ocelli._images._IMAGES))\n"
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
        "{START}\
         import glob, warnings\n\
         settings['optim.length'] = {{'steps': 1}}\n\
         run = ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)\n\
         images = sorted(glob.glob('files/train-000000/*.jpg'))\n\
         open('text.png', 'w').write('no image')\n\
         def warned(images):\n    \
             with warnings.catch_warnings(record=True) as caught:\n        \
                 warnings.simplefilter('always')\n        \
                 features, names = ocelli.embed(run, images, show_progress=False)\n    \
             assert len(features) == len(names) == 2, names\n    \
             return [str(warning.message) for warning in caught]\n\
         assert warned(images[:2]) == []\n\
         message, = warned([images[0], 'nope.png', images[1], 'text.png'])\n\
         assert message.startswith('2 unusable images without a row: '), message\n\
         assert 'nope.png (it is missing), ' in message and 'text.png (cannot decode' in message, message\n\
         message, = warned(images[:2] + [f'gone{{i}}.png' for i in range(9)])\n\
         assert 'gone4.png' in message and message.endswith(', and 4 more'), message\n"
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
        "{START}\
         import numpy\n\
         from PIL import Image\n\
         settings['optim.length'] = {{'steps': 1}}\n\
         run = ocelli.pretrain('tiny.toml', 'data', 'run', settings=settings, show_progress=False)\n\
         y, x = numpy.indices((18, 20))\n\
         image = Image.fromarray((x * 3000 + y * 300).astype('uint16'))\n\
         assert image.mode == 'I;16', image.mode\n\
         features, names = ocelli.embed(run, 'deep.png')\n\
         assert (ocelli.embed(run, [image])[0] == features).all()\n\
         for mode in ['I', 'F']:\n    \
             try:\n        \
                 ocelli.embed(run, [image.convert(mode)])\n        \
                 raise AssertionError(mode)\n    \
             except TypeError as error:\n        \
                 assert f'of mode {{mode}}' in str(error) and 'embed the file' in str(error), error\n"
    );
    module.run(&world, &code);
}

/// The error about arrays of other shapes and types names what came, and an expression that repairs
/// it.
#[test]
fn arrays_of_other_shapes_and_types_are_refused_with_what_to_do() {
    let Some(module) = Module::new() else { return };
    let world = World::new(4);
    let code = "import numpy, ocelli\n\
         def refused(images):\n    \
             try:\n        \
                 ocelli.embed('run', images)\n    \
             except (TypeError, ValueError) as error:\n        \
                 return str(error)\n\
         images = numpy.zeros((4, 32, 30, 3), 'uint8')\n\
         gray = images[..., 0]\n\
         planes = images.transpose(0, 3, 1, 2)\n\
         cases = [\n    \
             (planes, 'uint8 of shape [4, 3, 32, 30]', 'images.transpose(0, 2, 3, 1)'),\n    \
             (planes[0], 'uint8 of shape [3, 32, 30]', 'images.transpose(1, 2, 0)'),\n    \
             (gray, 'uint8 of shape [4, 32, 30]', 'numpy.stack([images] * 3, axis=-1)'),\n    \
             (gray[0], 'uint8 of shape [32, 30]', 'numpy.stack([images] * 3, axis=-1)'),\n    \
             (gray[:, None], 'uint8 of shape [4, 1, 32, 30]', 'numpy.stack([images[:, 0]] * 3, axis=-1)'),\n    \
             (gray[..., None], 'uint8 of shape [4, 32, 30, 1]', 'numpy.repeat(images, 3, axis=-1)'),\n    \
             (images / 255, 'float64 of shape [4, 32, 30, 3]', '(255 * images).round().astype(\\'uint8\\')'),\n    \
             (images.astype('uint16'), 'uint16 of shape', '(images >> 8).astype(\\'uint8\\')'),\n\
         ]\n\
         for wrong, what, remedy in cases:\n    \
             message = refused(wrong)\n    \
             assert '[N, H, W, 3]' in message and 'images is ' + what in message and remedy in message, message\n    \
             ocelli._images.checked_array(eval(remedy, {'images': wrong, 'numpy': numpy}), 'images')\n\
         assert 'numpy.stack([images[1]] * 3' in refused([images[0], gray[0]])\n\
         assert 'images[0] must be one image' in refused([images])\n\
         assert 'images[1] is None' in refused(['0.png', None])\n\
         assert 'images[0] is 0.5' in refused(numpy.array([0.5]))\n\
         assert refused([]) == 'images is empty'\n";
    module.run(&world, code);
}

/// Paths come as a list, or as a column of a data frame, which is no list but becomes one.
#[test]
fn columns_of_paths_are_lists_of_paths() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let code = format!(
        "{START}\
         import numpy, pathlib\n\
         class Column:\n    \
             ndim = 1\n    \
             def __init__(self, values):\n        \
                 self.values, self.shape = values, (len(values),)\n    \
             def tolist(self):\n        \
                 return list(self.values)\n\
         shard = 'data/train-000000.tar'\n\
         columns = [[shard], Column([shard]), numpy.array([shard]), numpy.array([pathlib.Path(shard)])]\n\
         for i, images in enumerate(columns):\n    \
             ocelli.pretrain('tiny.toml', images, f'run{{i}}', settings=settings, show_progress=False)\n\
         def refused(images):\n    \
             try:\n        \
                 ocelli.pretrain('tiny.toml', images, 'other')\n    \
             except TypeError as error:\n        \
                 return str(error)\n\
         assert 'images[1] is nan' in refused(Column([shard, float('nan')]))\n\
         assert 'only ocelli.embed takes images in memory' in refused(numpy.zeros((2, 8, 8, 3), 'uint8'))\n\
         try:\n    \
             import pandas\n\
         except ImportError:\n    \
             pandas = None\n\
         if pandas:\n    \
             ocelli.pretrain('tiny.toml', pandas.Series([shard]), 'series', settings=settings, show_progress=False)\n"
    );
    module.run(&world, &code);
}

/// A run is scored, exported, put on a page and listed; the numbers are those of the program.
#[test]
fn a_run_in_python_is_scored_exported_reported_and_listed() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let code = format!(
        "{START}\
         import json\n\
         run = ocelli.pretrain('tiny.toml', 'data', 'runs/a', settings=settings, show_progress=False)\n\
         scores = ocelli.probe(run, 'data', ['data/train-000000.tar'], protocols=['knn'], baseline=True)\n\
         networks = scores['networks']\n\
         assert set(networks) == {{'teacher', 'random_init', 'pixels'}}, networks.keys()\n\
         files = ocelli.export(run, 'out/backbone.safetensors', precision='f16')\n\
         assert files[0].stat().st_size > 0, files\n\
         try:\n    \
             ocelli.export(run, 'out/backbone.safetensors')\n\
         except ocelli.ConfigurationError as error:\n    \
             assert '--overwrite' in str(error)\n\
         ocelli.export(run, 'out/backbone.safetensors', overwrite=True)\n\
         page = ocelli.report(run, '--no-pictures', out='page.html')\n\
         assert page.read_text().startswith('<'), page\n\
         page = ocelli.report(checkpoint=run, images='data', out='weights')\n\
         assert page.parent.name == 'weights' and page.read_text().startswith('<'), page\n\
         assert page == ocelli.report(checkpoint=run, images=['data'], out='weights', overwrite=True)\n\
         flags = ['--checkpoint', run, '--images', 'data', '--out', 'flags']\n\
         assert ocelli.report([], *flags).name == page.name\n\
         listed = ocelli.runs('runs')\n\
         assert isinstance(listed, list) and listed[0]['total_steps'] == 4, listed\n\
         assert 'finished' in str(listed) and '<td>finished</td>' in listed._repr_html_()\n\
         table = ocelli.seed_table('runs')\n\
         assert table['rows'][0]['seeds'] == [3], table\n\
         assert 'tabular' in ocelli.seed_table('runs', 'latex')\n\
         print(ocelli.__version__)\n\
         print(json.dumps(networks['teacher']['knn_10']['accuracy']))\n"
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
        "{START}\
         ocelli.pretrain('tiny.toml', 'data', 'runs/scored', settings=settings, show_progress=False)\n\
         ocelli.probe('runs/scored', None, 'data', '--leave-one-out', protocols='knn', show_progress=False)\n\
         settings['optim'] = {{'batch_size': 16, 'length': {{'steps': 400}}}}\n\
         del settings['optim.length']\n\
         ocelli.pretrain('tiny.toml', 'data', 'runs/views', settings=settings, show_progress=False)\n\
         runs = ocelli.runs('runs')\n\
         lines = str(runs).splitlines()\n\
         scored, views = runs\n\
         assert lines[1].count('knn_') == 1 and views['best'] is None, lines\n\
         assert 'score: first → best → last' in lines[0], lines\n\
         assert ' → ' in views['learning']['course']\n\
         program = ocelli._run('runs', 'runs')\n\
         scores = [scored['best']['metric'] + ' ' + scored['best']['course'], 'views ' + views['learning']['course']]\n\
         for line, score in zip(lines[1:], scores):\n    \
             assert score in line and score in program and score in runs._repr_html_(), (score, line, program)\n"
    );
    module.run(&world, &code);
}

/// A message is printed once, with its level. In a notebook the line of progress is drawn over
/// itself, and no message is lost in it; elsewhere it is a line of a log.
#[test]
fn messages_in_python_are_shown_once() {
    let Some(module) = Module::new() else { return };
    let world = World::new(24);
    let train = "settings['optim.batch_size'] = 32\n\
         ocelli.pretrain('tiny.toml', 'data', workdir, settings=settings, show_progress=show_progress)\n";
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
            "{START}\
             ocelli.pretrain('tiny.toml', 'data', 'run{flag}', '{flag}', settings=settings, show_progress=False)\n"
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
