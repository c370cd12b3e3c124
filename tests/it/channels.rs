//! Images of many channels as a user has them: packed, measured, trained on, exported.

use std::fs;
use std::path::Path;

use augment::{DecodeRules, Depth, Image};
use pipeline::{Dataset, SampleId};

use crate::bands::{check, golden, npy_u16, rules, values};
use crate::support::{World, fails, json_of, metrics, ok, open, program};

/// Writes images of two classes and five channels of 16 bits into a folder per class, in several
/// formats.
fn tiles(folder: &Path) {
    for class in ["land", "sea"] {
        fs::create_dir_all(folder.join(class)).unwrap();
    }
    for i in 0..32usize {
        let class = ["land", "sea"][i % 2];
        let value = |c: usize, y: usize, x: usize| {
            let wave = ((x * (1 + 3 * (i % 2)) + y + i) as f32 * 0.7).sin();
            (3000.0 + 1500.0 * (c as f32 + 1.0) + 900.0 * wave) as u16
        };
        let all: Vec<u16> = (0..5 * 24 * 20).map(|at| value(at / 480, at / 20 % 24, at % 20)).collect();
        fs::write(folder.join(format!("{class}/t{i:02}.npy")), npy_u16([5, 24, 20], &all)).unwrap();
    }
}

/// Overrides of the quickest recipe for these images.
fn overrides(constants: &str) -> Vec<String> {
    let normalization = format!("data.normalization={constants}");
    let all = [
        "data.channels=5",
        "data.bits=16",
        "views.channels={ rotate_p = 0.5, drop_p = 0.1 }",
        &normalization,
    ];
    all.iter().flat_map(|entry| ["--set".to_string(), entry.to_string()]).collect()
}

/// Folder, shards, constants, training that goes on after a stop, scores, features and exports, as
/// a user goes through them.
#[test]
fn tiles_of_five_channels_from_a_folder_to_an_export() {
    let world = World::new(4);
    tiles(&world.path("tiles"));
    let shards = world.text("shards");
    ok(&world.ocelli(&["shards", "pack", &world.text("tiles"), "--out", &shards]));
    let stats = world.ocelli(&["shards", "stats", &shards, "--channels", "5", "--bits", "16", "--json"]);
    let line = json_of(&stats);
    assert_eq!((&line["bad"], line["mean"].as_array().unwrap().len()), (&0.into(), 5), "{line}");
    let said = String::from_utf8_lossy(&stats.stdout);
    let constants = said.lines().find_map(|line| line.trim().strip_prefix("normalization = ")).unwrap();
    let rgb = json_of(&world.ocelli(&["shards", "stats", &shards, "--json"]));
    assert_eq!(rgb["other_pixels"]["5 channels of 16 bits"], 32, "{rgb}");

    let sets = overrides(constants);
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let train = |workdir: &str, length: &str, more: &[&str]| {
        let length = format!("optim.length={{steps={length}}}");
        let mut args = world.pretrain_args(workdir, &[&["--set", &length][..], &sets, more].concat());
        args[4].clone_from(&shards);
        program().args(args).output().unwrap()
    };
    ok(&train("run", "6", &[]));
    assert!(!train("parts", "6", &["--inject-fault", "kill:step=3,phase=backward"]).status.success());
    ok(&train("parts", "6", &[]));
    let losses = |run: &str| -> Vec<String> {
        metrics(&world.path(run)).iter().map(|row| row["loss"].to_string()).collect()
    };
    assert_eq!(losses("run"), losses("parts"), "a run that goes on is the same run");

    let run = world.text("run");
    let probe =
        ["probe", "--checkpoint", &run, "--train", &shards, "--test", &shards, "--protocol", "knn", "--json"];
    ok(&world.ocelli(&probe));
    let features = |checkpoint: &str, out: &str| {
        let out = world.text(out);
        ok(&world.ocelli(&["embed", "--checkpoint", checkpoint, "--shards", &shards, "--out", &out]));
        fs::read(out).unwrap()
    };
    let ours = features(&run, "run.npy");
    for (format, name) in [("timm", "timm"), ("onnx", "a.onnx"), ("safetensors", "a.safetensors")] {
        let out = world.text(name);
        ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &out, "--format", format]));
        assert!(features(&out, &format!("{format}.npy")) == ours, "{format}: other features");
    }
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(world.path("timm/config.json")).unwrap()).unwrap();
    assert_eq!(
        (&config["model_args"]["in_chans"], &config["pretrained_cfg"]["input_size"][0]),
        (&5.into(), &5.into())
    );
    let card = fs::read_to_string(world.path("timm/README.md")).unwrap();
    assert!(card.contains("Images: 5 channels of 16 bits") && card.contains("numpy.load"), "{card}");
    let torchvision = world.ocelli(&[
        "export",
        "--checkpoint",
        &run,
        "--out",
        &world.text("t.pth"),
        "--format",
        "torchvision",
    ]);
    assert!(fails(&torchvision, 2).contains("three channels"));

    // Weights for RGB begin a run on five channels, by a rule that the card tells.
    ok(&world.pretrain("rgb", &["--set", "optim.length={steps=2}"]));
    let rgb = world.text("rgb");
    assert!(fails(&train("warm", "2", &["--init", &rgb]), 2).contains("init.first_layer=repeat"));
    let init = format!("init={{ weights = '{rgb}', first_layer = 'repeat' }}");
    ok(&train("warm", "2", &["--set", &init]));
    ok(&world.ocelli(&[
        "export",
        "--checkpoint",
        &world.text("warm"),
        "--out",
        &world.text("w.safetensors"),
    ]));
    let card = fs::read_to_string(world.path("w.safetensors.md")).unwrap();
    assert!(
        card.contains("converted to 5 channels: each channel took the kernel of red, green or blue in turn"),
        "{card}"
    );
}

/// Files of one band each are one sample, with the class and the columns beside them.
#[test]
fn files_of_bands_are_joined() {
    let world = World::new(4);
    let folder = world.path("sentinel");
    fs::create_dir_all(&folder).unwrap();
    for tile in ["t1", "t2.x"] {
        for (band, name) in ["B02", "B03", "B04", "B8A", "B11"].into_iter().enumerate() {
            fs::write(folder.join(format!("{tile}.{name}.tif")), golden(&format!("band{band}.tif"))).unwrap();
        }
    }
    fs::write(folder.join("t1.cls"), "7").unwrap();
    fs::write(folder.join("t1.json"), r#"{"orbit": 22}"#).unwrap();
    let out = world.text("joined");
    ok(&world.ocelli(&["shards", "pack", &world.text("sentinel"), "--out", &out, "--bands"]));
    let dataset = open(&world, &out).unwrap();
    assert_eq!(dataset.n_samples(), 2);
    let (first, second) = match dataset.read(SampleId(0)).unwrap() {
        sample if sample.key == "t1" => (sample, dataset.read(SampleId(1)).unwrap()),
        sample => (dataset.read(SampleId(1)).unwrap(), sample),
    };
    assert_eq!((first.label, second.key.as_str()), (Some(7), "t2_x"));
    check(&first.image.files(), &rules(5, Depth::Sixteen), &values(false), "bands of a sample");
    let columns = dataset.member(first.id, &["json"]).unwrap().unwrap();
    assert!(String::from_utf8(columns).unwrap().contains("\"orbit\":22"));
    ok(&world.ocelli(&["shards", "verify", &out]));
    // Read as RGB, such a sample is refused by what it is.
    let refused = Image::decode(&first.image.files(), &DecodeRules::default()).unwrap_err().to_string();
    assert!(refused.contains("5 channels in place of 3 channels of 8 bits"), "{refused}");
    // Bands of another size are no sample; the others are packed.
    fs::write(folder.join("t2.x.B03.tif"), golden("overviews.tif")).unwrap();
    fs::write(folder.join("t2.x.B04.tif"), npy_u16([1, 3, 4], &[7; 12])).unwrap();
    let packed = world.ocelli(&[
        "shards",
        "pack",
        &world.text("sentinel"),
        "--out",
        &world.text("rest"),
        "--bands",
        "--json",
    ]);
    assert_eq!(json_of(&packed)["failed"], 1);
}

/// Files that a PNG of 8 bits cannot hold are packed as they are.
#[test]
fn packing_loses_no_bits_and_no_map() {
    let world = World::new(4);
    fs::create_dir_all(world.path("in")).unwrap();
    for name in ["planes.tif", "gray.png", "floats.npy"] {
        fs::write(world.path("in").join(name), golden(name)).unwrap();
    }
    let out = world.text("out");
    ok(&world.ocelli(&["shards", "pack", &world.text("in"), "--out", &out]));
    let dataset = open(&world, &out).unwrap();
    let mut packed: Vec<Vec<u8>> =
        (0..3).map(|id| dataset.read(SampleId(id)).unwrap().image.bytes().to_vec()).collect();
    let mut files: Vec<Vec<u8>> = ["planes.tif", "gray.png", "floats.npy"].map(golden).into();
    packed.sort();
    files.sort();
    assert!(packed == files, "the bytes of the files");
    let resized = world.text("resized");
    ok(&world.ocelli(&["shards", "resize", &out, "--out", &resized, "--short-side", "8"]));
    let resized = open(&world, &resized).unwrap();
    let bytes = |dataset: &Dataset, id| dataset.read(SampleId(id)).unwrap().image;
    assert!((0..3).all(|id| bytes(&resized, id) == bytes(&dataset, id)), "16 bits stay 16 bits");
}
