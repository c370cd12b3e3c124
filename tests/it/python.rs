//! The Python module, which runs commands of the program within the Python process.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::libraries::python;
use crate::support::{World, metrics, ok, program, wait_for, wait_for_end};

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
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/python/ocelli/__init__.py");
        std::fs::copy(source, package.join("__init__.py")).unwrap();
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
        let output = self.command(world, code).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        String::from_utf8(output.stdout).unwrap()
    }
}

/// Start of a program: a run of a few steps.
const START: &str = "import ocelli\n\
    settings = {'optim.length': '{ steps = 4 }', 'run.workers': 1, 'run.log_every_steps': 1}\n";

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
                 print(error)\n"
    );
    let output = module.run(&world, &code);
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
         settings['optim.length'] = '{{ steps = 100000 }}'\n\
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

/// Returns whether the run in `workdir` has a checkpoint.
fn has_checkpoint(workdir: &Path) -> bool {
    workdir.join("checkpoints/latest").exists()
}
