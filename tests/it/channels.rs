//! Images of many channels, from packing to training and export.

use std::fs;
use std::path::Path;
use std::process::Output;

use augment::{AugmentError, DecodeRules, Depth, Image};
use pipeline::SampleId;

use crate::bands::{check, golden, npy_u16, rules, values};
use crate::messages::check_message;
use crate::support::{World, fails, json_of, metrics, ok, open, program};

/// Writes images of two classes and five channels of 16 bits into a folder per class.
fn write_tiles(folder: &Path) {
    for class in ["land", "sea"] {
        fs::create_dir_all(folder.join(class)).unwrap();
    }
    for i in 0..32usize {
        let class = ["land", "sea"][i % 2];
        let mut values: Vec<u16> = Vec::new();
        for c in 0..5usize {
            for y in 0..24usize {
                for x in 0..20usize {
                    let wave = ((x * (1 + 3 * (i % 2)) + y + i) as f32 * 0.7).sin();
                    values.push((3000.0 + 1500.0 * (c as f32 + 1.0) + 900.0 * wave) as u16);
                }
            }
        }
        fs::write(folder.join(format!("{class}/t{i:02}.npy")), npy_u16([5, 24, 20], &values)).unwrap();
    }
}

/// Trains on `shards` for `length` steps, with the tiny recipe for five channels of 16 bits and
/// this normalization.
fn train(
    world: &World,
    shards: &str,
    normalization: &str,
    workdir: &str,
    length: &str,
    more: &[&str],
) -> Output {
    let length = format!("optim.length={{steps={length}}}");
    let normalization = format!("data.normalization={normalization}");
    let channels = "views.channels={ rotate_p = 0.5, drop_p = 0.1 }";
    let settings = [length.as_str(), "data.channels=5", "data.bits=16", channels, normalization.as_str()];
    let mut flags: Vec<&str> = settings.iter().flat_map(|setting| ["--set", *setting]).collect();
    flags.extend(more);
    let mut args = world.pretrain_args(workdir, &flags);
    args[4] = shards.to_string();
    program().args(args).output().unwrap()
}

/// Returns the losses of a run.
fn losses(world: &World, run: &str) -> Vec<String> {
    metrics(&world.path(run)).iter().map(|row| row["loss"].to_string()).collect()
}

/// Writes the features of `shards` to the file `out`, and returns its bytes.
fn features(world: &World, checkpoint: &str, shards: &str, out: &str) -> Vec<u8> {
    let out = world.text(out);
    ok(&world.ocelli(&["embed", "--checkpoint", checkpoint, "--shards", shards, "--out", &out]));
    fs::read(out).unwrap()
}

/// Folder, shards, normalization, training that resumes after a fault, scores, features and
/// exports.
#[test]
fn tiles_of_five_channels_from_a_folder_to_an_export() {
    let world = World::new(4);
    write_tiles(&world.path("tiles"));
    let shards = world.text("shards");
    ok(&world.ocelli(&["shards", "pack", &world.text("tiles"), "--out", &shards]));
    let stats = world.ocelli(&["shards", "stats", &shards, "--channels", "5", "--bits", "16", "--json"]);
    let line = json_of(&stats);
    assert_eq!((&line["bad"], line["mean"].as_array().unwrap().len()), (&0.into(), 5), "{line}");
    let stdout = String::from_utf8_lossy(&stats.stdout);
    let normalization = stdout.lines().find_map(|line| line.trim().strip_prefix("normalization = ")).unwrap();
    let rgb = json_of(&world.ocelli(&["shards", "stats", &shards, "--json"]));
    assert_eq!(rgb["other_pixels"]["5 channels of 16 bits"], 32, "{rgb}");
    let output = world.ocelli(&["shards", "stats", &shards]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("not 3 channels of 8 bits: --channels 5 --bits 16 reads them"), "{stdout}");
    assert!(!stdout.contains("0.0"), "no statistics of nothing: {stdout}");

    ok(&train(&world, &shards, normalization, "run", "6", &[]));
    let fault = ["--inject-fault", "kill:step=3,phase=backward"];
    assert!(!train(&world, &shards, normalization, "parts", "6", &fault).status.success());
    ok(&train(&world, &shards, normalization, "parts", "6", &[]));
    assert_eq!(losses(&world, "run"), losses(&world, "parts"), "a resumed run has the same losses");

    let run = world.text("run");
    let probe =
        ["probe", "--checkpoint", &run, "--train", &shards, "--test", &shards, "--protocol", "knn", "--json"];
    ok(&world.ocelli(&probe));
    let expected = features(&world, &run, &shards, "run.npy");
    for (format, name) in [("timm", "timm"), ("onnx", "a.onnx"), ("safetensors", "a.safetensors")] {
        let out = world.text(name);
        ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &out, "--format", format]));
        let exported = features(&world, &out, &shards, &format!("{format}.npy"));
        assert!(exported == expected, "{format}: other features");
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
    check_message("channels::tiles_of_five_channels_from_a_folder_to_an_export", &fails(&torchvision, 2));

    // Weights for RGB begin a run on five channels, by a rule that the card states.
    ok(&world.pretrain("rgb", &["--set", "optim.length={steps=2}"]));
    let rgb = world.text("rgb");
    let without_rule = train(&world, &shards, normalization, "warm", "2", &["--init", &rgb]);
    assert!(fails(&without_rule, 2).contains("init.first_layer=repeat"));
    let init = format!("init={{ weights = '{rgb}', first_layer = 'repeat' }}");
    ok(&train(&world, &shards, normalization, "warm", "2", &["--set", &init]));
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

/// Returns the flags that a message types out, as a shell would pass them.
fn typed_flags(message: &str) -> Vec<String> {
    let mut flags = Vec::new();
    for line in message.lines().filter(|line| line.starts_with("  --set ")) {
        let (flag, value) = line.trim_end_matches('\\').trim().split_once(' ').unwrap();
        flags.push(flag.to_string());
        flags.push(value.trim_matches('\'').to_string());
    }
    flags
}

/// Everything that a recipe lacks for tiles is named at once, and the flags that the message types
/// out are enough.
#[test]
fn all_settings_for_tiles_are_named_at_once() {
    let world = World::new(8);
    write_tiles(&world.path("tiles"));
    ok(&world.pretrain("rgb", &["--set", "optim.length={steps=1}"]));
    let rgb = world.text("rgb");
    let mut args = world.pretrain_args("tiled", &["--init", &rgb, "--set", "optim.length={steps=1}"]);
    args[4] = world.text("tiles");
    let stderr = fails(&program().args(&args).output().unwrap(), 2);
    check_message("channels::all_settings_for_tiles_are_named_at_once", &stderr);
    let flags = typed_flags(&stderr);
    assert_eq!(flags.len(), 10, "{flags:?}");
    ok(&program().args(&args).args(&flags).output().unwrap());
    // Settings that are given are not named again.
    args.extend(["--set".to_string(), "data.channels=5".into(), "--set".into(), "data.bits=16".into()]);
    args[6] = world.text("others");
    let stderr = fails(&program().args(&args).output().unwrap(), 2);
    check_message("channels::all_settings_for_tiles_are_named_at_once.rest", &stderr);
    assert_eq!(typed_flags(&stderr).len(), 6, "{stderr}");
}

/// Images of a format that is not read, and files that are no images, are named before a run.
#[test]
fn unusable_images_say_what_they_have_in_common() {
    let world = World::new(8);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=1}"]));
    let run = world.text("run");
    let heic = b"\0\0\0\x20ftypheic\0\0\0\0".as_slice();
    let files: [(&str, &[u8]); 3] = [
        ("page", b"<!DOCTYPE html><title>Login</title>"),
        ("heic", heic),
        ("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    ];
    for (name, bytes) in files {
        let folder = world.path(name);
        fs::create_dir(&folder).unwrap();
        for number in 0..5 {
            fs::write(folder.join(format!("{number}.jpg")), bytes).unwrap();
        }
        let mut args = world.pretrain_args(&format!("{name}-run"), &[]);
        args[4] = world.text(name);
        let section = format!("channels::unusable_images_say_what_they_have_in_common.{name}");
        check_message(&section, &fails(&program().args(&args).output().unwrap(), 3));
        let out = world.text(&format!("{name}.npy"));
        let embed = ["embed", "--checkpoint", &run, "--images", &world.text(name), "--out", &out];
        check_message(&format!("{section}.embed"), &fails(&world.ocelli(&embed), 3));
    }
}

/// Files of one band each are joined to one sample, with their class, columns and mask.
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
    fs::write(folder.join("t1.seg.png"), golden("gray.png")).unwrap();
    let out = world.text("joined");
    ok(&world.ocelli(&["shards", "pack", &world.text("sentinel"), "--out", &out, "--bands"]));
    let dataset = open(&world, &out).unwrap();
    assert_eq!(dataset.n_samples(), 2);
    let mut first = dataset.read(SampleId(0)).unwrap();
    let mut second = dataset.read(SampleId(1)).unwrap();
    if first.key != "t1" {
        std::mem::swap(&mut first, &mut second);
    }
    assert_eq!((first.label, second.key.as_str()), (Some(7), "t2_x"));
    check(&first.image.files(), &rules(5, Depth::Sixteen), &values(false), "bands of a sample");
    let columns = dataset.member(first.id, &["json"]).unwrap().unwrap();
    assert!(String::from_utf8(columns).unwrap().contains("\"orbit\":22"));
    assert_eq!(dataset.member(first.id, &["seg.png"]).unwrap(), Some(golden("gray.png")));
    assert_eq!(dataset.member(second.id, &["seg.png"]).unwrap(), None);
    ok(&world.ocelli(&["shards", "verify", &out]));
    // Read as RGB, such a sample is refused with its format.
    let refused = Image::decode(&first.image.files(), &DecodeRules::default()).unwrap_err();
    let AugmentError::Format { found, expected } = &refused else { panic!("{refused}") };
    assert_eq!((found.as_str(), *expected), ("5 channels", DecodeRules::default().format));
    // Bands of different sizes are not packed; the other tile is.
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

/// Files that a PNG of 8 bits cannot hold are packed unchanged.
#[test]
fn packing_loses_no_bits_and_no_channels() {
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
    for id in 0..3 {
        let image = resized.read(SampleId(id)).unwrap().image;
        assert!(image == dataset.read(SampleId(id)).unwrap().image, "16 bits stay 16 bits");
    }
}
