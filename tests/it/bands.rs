//! Images of many channels: what is decoded, packed, measured, trained on, exported and refused.

use std::fs;
use std::path::Path;

use augment::bands::{Bands, decode, found};
use augment::facts::facts;
use augment::{AugmentError, DecodeRules, Depth, Image, PixelFormat, Transform};
use pipeline::{Dataset, SampleId};

use crate::support::{World, fails, json_of, ok, open, program};

/// Size and channels of the golden images (`scripts/golden/bands.py` made the files with tifffile, Pillow and NumPy).
const SHAPE: [usize; 3] = [5, 14, 20];

fn golden(name: &str) -> Vec<u8> {
    fs::read(format!("{}/golden/bands/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn rules(n_channels: usize, depth: Depth) -> DecodeRules {
    DecodeRules { format: PixelFormat { n_channels, depth }, ..DecodeRules::default() }
}

/// Values of the golden image of 16 bits, or of 8 bits if `narrow`.
fn values(narrow: bool) -> Vec<f32> {
    match narrow {
        true => golden("narrow.bin").iter().map(|byte| f32::from(*byte)).collect(),
        false => {
            let bytes = golden("wide.bin");
            bytes.as_chunks().0.iter().map(|pair| f32::from(u16::from_le_bytes(*pair))).collect()
        }
    }
}

/// Asserts that `files` are an image of `rules`' format with these values.
fn check(files: &[&[u8]], rules: &DecodeRules, values: &[f32], name: &str) {
    let image = decode(files, rules).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!([image.height_px as usize, image.width_px as usize], SHAPE[1..], "{name}");
    assert!(image.values == values, "{name}");
    let stated = found(files, rules).unwrap();
    assert_eq!((stated.n_channels, stated.width_px), (rules.format.n_channels, image.width_px), "{name}");
    assert!(rules.format.depth == Depth::Float || stated.depth == rules.format.depth, "{name}");
}

#[test]
fn every_layout_has_the_same_values() {
    let wide = values(false);
    for name in [
        "planes.tif",
        "planes_in_strips.tif",
        "pixels.tif",
        "tiles.tif",
        "tiled_planes.tif",
        "big.tif",
        "zstd.tif",
        "pages.tif",
        "overviews.tif",
        "channels_first.npy",
        "channels_last.npy",
    ] {
        check(&[&golden(name)], &rules(5, Depth::Sixteen), &wide, name);
        check(&[&golden(name)], &rules(5, Depth::Float), &wide, name);
        assert_eq!(facts(&golden(name)).unwrap().width_px, 20, "{name}");
    }
    check(&[&golden("narrow.tif")], &rules(5, Depth::Eight), &values(true), "narrow.tif");
    check(&[&golden("gray.png")], &rules(1, Depth::Sixteen), &wide[..280], "gray.png");
    let signed: Vec<f32> = wide.iter().map(|value| value % 30_000.0 - 15_000.0).collect();
    check(&[&golden("signed.tif")], &rules(5, Depth::Float), &signed, "signed.tif");
    let floats: Vec<f32> = wide.iter().map(|value| (value - 30_000.0) / 16.0).collect();
    for name in ["floats.tif", "floats.npy"] {
        check(&[&golden(name)], &rules(5, Depth::Float), &floats, name);
    }
    let bands: Vec<Vec<u8>> = (0..5).map(|band| golden(&format!("band{band}.tif"))).collect();
    let bands: Vec<&[u8]> = bands.iter().map(Vec::as_slice).collect();
    check(&bands, &rules(5, Depth::Sixteen), &wide, "five files");
}

/// torchvision's resize and crop of floating-point tensors.
#[test]
fn the_transform_is_torchvisions() {
    let image = decode(&[&golden("planes.tif")], &rules(5, Depth::Sixteen)).unwrap();
    let square = Transform { resize_px: 12, size_px: 8 }.apply_to(&Image::from(image.clone())).unwrap();
    let ours = Bands::of_bytes(&square, image.format(), 8);
    let theirs = golden("small.bin");
    let theirs: Vec<f32> = theirs.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
    assert_eq!(ours.values.len(), theirs.len());
    let largest = ours.values.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 0.55, "{largest}: more than rounding");
}

#[test]
fn what_does_not_fit_together_is_named() {
    let refused = |files: &[&[u8]], rules: &DecodeRules| decode(files, rules).unwrap_err().to_string();
    let (wide, narrow) = (golden("planes.tif"), golden("narrow.tif"));
    let five = rules(5, Depth::Sixteen);
    assert_eq!(
        refused(&[&wide], &rules(4, Depth::Sixteen)),
        "5 channels in place of 4 channels of 16 bits (data.channels, data.bits)"
    );
    assert!(refused(&[&wide], &rules(13, Depth::Sixteen)).contains("5 channels of 16 bits in place of 13"));
    assert!(refused(&[&narrow], &five).contains("5 channels of 8 bits in place of 5 channels of 16 bits"));
    assert!(refused(&[&golden("signed.tif")], &five).contains("other numbers than 8 or 16 bits"));
    let (one, two) = (golden("band0.tif"), golden("gray.png"));
    let small = Image::decode(&[&one], &rules(1, Depth::Sixteen)).unwrap();
    assert_eq!(small.size_px(), [20, 14]);
    let ten = rules(10, Depth::Sixteen);
    assert!(refused(&[&one, &narrow], &ten).contains("file 2 has 8 bits, file 1 16 bits"));
    assert!(
        refused(&[&golden("mixed.tif")], &rules(2, Depth::Sixteen)).contains("values of different types")
    );
    let other_size = npy_u16([1, 3, 4], &[7; 12]);
    assert!(refused(&[&one, &two, &other_size], &ten).contains("file 3 has 4 x 3 pixels, file 1 20 x 14"));
    let holes = npy_f32([1, 1, 2], &[1.0, f32::NAN]);
    assert!(refused(&[&holes], &rules(1, Depth::Float)).contains("not a finite number"));
    // 8-bit RGB is asked for, and the header says what is there.
    let rgb = Image::decode(&[&wide], &DecodeRules::default()).unwrap_err().to_string();
    assert!(rgb.contains("5 channels of 16 bits in place of 3 channels of 8 bits"), "{rgb}");
}

/// A header that states more than the limit is refused before anything is allocated, whatever the number of channels.
#[test]
fn headers_that_lie_are_refused() {
    let mut tiff = golden("planes.tif");
    // Width, length and rows of a strip, the tags 256, 257 and 278, as 32-bit numbers.
    for tag in [256u16, 257, 278] {
        let at = (0..tiff.len() - 12).find(|at| tiff[*at..at + 2] == tag.to_le_bytes()).unwrap();
        tiff[at + 2..at + 4].copy_from_slice(&4u16.to_le_bytes());
        tiff[at + 8..at + 12].copy_from_slice(&40_000u32.to_le_bytes());
    }
    let error = decode(&[&tiff], &rules(5, Depth::Sixteen)).unwrap_err();
    assert!(matches!(error, AugmentError::TooManyPixels { width_px: 40_000, .. }), "{error}");
    let error = decode(&[&npy_header([1, 60_000, 60_000], "<u2")], &rules(1, Depth::Sixteen)).unwrap_err();
    assert!(matches!(error, AugmentError::TooManyPixels { .. }), "{error}");
    // As many values as a photograph of the largest size has, in more channels.
    let wide = npy_header([1000, 1000, 1000], "<u2");
    let error = decode(&[&wide], &rules(1000, Depth::Sixteen)).unwrap_err();
    assert!(matches!(error, AugmentError::TooManyPixels { .. }), "{error}");
    let cut = npy_header([1, 100, 100], "<u2");
    assert!(decode(&[&cut], &rules(1, Depth::Sixteen)).unwrap_err().to_string().contains("ends before"));
}

/// Damaged files are errors: bytes are changed and ends cut off, at places and to values that a fixed sequence gives.
#[test]
fn damaged_files_never_panic() {
    let names = [
        "planes.tif",
        "tiles.tif",
        "tiled_planes.tif",
        "pages.tif",
        "overviews.tif",
        "big.tif",
        "floats.tif",
        "zstd.tif",
        "floats.npy",
        "channels_last.npy",
        "gray.png",
    ];
    let mut state = 7u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut n_refused = 0;
    for name in names {
        let whole = golden(name);
        for _ in 0..400 {
            let mut bytes = whole.clone();
            // Most of what a TIFF says about itself is at one of its ends.
            let near = if draw(2) == 0 {
                draw(bytes.len().min(400))
            } else {
                bytes.len() - 1 - draw(bytes.len().min(400))
            };
            for at in [near, draw(bytes.len())] {
                bytes[at] = draw(256) as u8;
            }
            if draw(4) == 0 {
                bytes.truncate(draw(whole.len()));
            }
            let limits = DecodeRules { max_pixels: 1 << 16, ..rules(5, Depth::Float) };
            let (decoded, _, _) = (decode(&[&bytes], &limits), found(&[&bytes], &limits), facts(&bytes));
            let _ = augment::bands::map_data(&bytes);
            n_refused += usize::from(decoded.is_err());
        }
    }
    assert!(n_refused > 500, "{n_refused}");
}

/// Header of a NumPy file of this shape.
fn npy_header(shape: [usize; 3], descr: &str) -> Vec<u8> {
    let [a, b, c] = shape;
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({a}, {b}, {c}), }}");
    let header = format!("{header:<117}\n");
    let len = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &len[..], header.as_bytes()].concat()
}

pub(crate) fn npy_u16(shape: [usize; 3], values: &[u16]) -> Vec<u8> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    [npy_header(shape, "<u2"), bytes].concat()
}

fn npy_f32(shape: [usize; 3], values: &[f32]) -> Vec<u8> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    [npy_header(shape, "<f4"), bytes].concat()
}

/// Writes images of two classes and five channels of 16 bits into a folder per class, in several formats.
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

/// Folder, shards, constants, training that goes on after a stop, scores, features and exports, as a user goes through them.
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
        crate::support::metrics(&world.path(run)).iter().map(|row| row["loss"].to_string()).collect()
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
    assert!(refused.contains("5 files, each with channels of its own"), "{refused}");
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
