//! Values of images that use a part of their bits, and pixels that stand for no data.

use std::fs;
use std::path::Path;
use std::process::Output;

use image::{ImageBuffer, Luma};

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, json_of, ok};

/// Writes gray images of 16 bits, whose values use 12 of them.
fn write_12_bit_images(folder: &Path) {
    for class in ["a", "b"] {
        fs::create_dir_all(folder.join(class)).unwrap();
    }
    for i in 0..16u32 {
        let class = ["a", "b"][i as usize % 2];
        let image = ImageBuffer::from_fn(48, 48, |x: u32, y: u32| {
            Luma([((x * 80 + y * 7 + i * 50) % 4096).max(u32::from(x == 0) * 4095) as u16])
        });
        image.save(folder.join(format!("{class}/{i:02}.png"))).unwrap();
    }
}

/// Mean of the first channel in a report of statistics.
fn mean(report: &serde_json::Value) -> f64 {
    report["mean"][0].as_f64().unwrap()
}

/// Runs `pretrain` on `shards` with more flags.
fn pretrain(world: &World, shards: &str, workdir: &str, more: &[&str]) -> Output {
    let mut args = world.pretrain_args(workdir, more);
    args[4] = shards.to_string();
    crate::support::program().args(args).output().unwrap()
}

/// Computes the features of `shards` and returns the file that holds them.
fn features(world: &World, checkpoint: &str, shards: &str, out: &str, more: &[&str]) -> Vec<u8> {
    let out = world.text(out);
    let args = ["embed", "--checkpoint", checkpoint, "--shards", shards, "--out", &out];
    ok(&world.ocelli(&[&args[..], more].concat()));
    fs::read(out).unwrap()
}

/// Images of 16 bits that use 12 of them are nearly black: every command reports it, and a key and
/// a flag scale them, in training, in its evaluation and in exported networks.
#[test]
fn bits_in_use_are_reported_and_scaled() {
    let world = World::new(4);
    write_12_bit_images(&world.path("narrow"));
    let shards = world.text("shards");
    let stderr = ok(&world.ocelli(&["shards", "pack", &world.text("narrow"), "--out", &shards]));
    check_message("values::bits_in_use_are_reported_and_scaled.pack", &lines_with(&stderr, "12 of 16 bits"));

    let stats = world.ocelli(&["shards", "stats", &shards, "--json"]);
    let dark = json_of(&stats);
    assert_eq!(dark["images_of_16_bits"], 16);
    assert_eq!(dark["largest_of_16_bits"], 4095);
    assert!(String::from_utf8_lossy(&stats.stdout).contains("use only 12 of 16 bits"), "{stats:?}");
    let scaled = world.ocelli(&["shards", "stats", &shards, "--bits-used", "12", "--json"]);
    let bright = json_of(&scaled);
    assert!(!String::from_utf8_lossy(&scaled.stdout).contains("of 16 bits: the largest"), "{scaled:?}");
    assert!(mean(&dark) < 0.05 && mean(&bright) > 0.3, "{} {}", mean(&dark), mean(&bright));
    // One bit less than is used is an error: no value is clipped silently.
    let clipped = world.ocelli(&["shards", "stats", &shards, "--bits-used", "11", "--json"]);
    assert_eq!(json_of(&clipped)["bad"], 16);

    let length = ["--set", "optim.length={steps=2}", "--set", "optim.batch_size=8"];
    let stderr = ok(&pretrain(&world, &shards, "dark", &length));
    check_message(
        "values::bits_in_use_are_reported_and_scaled.pretrain",
        &lines_with(&stderr, "12 of 16 bits"),
    );
    let with_bits = [&length[..], &["--set", "data.bits_used=12"]].concat();
    let stderr = ok(&pretrain(&world, &shards, "bright", &with_bits));
    assert!(!stderr.contains("of 16 bits: the largest"), "{stderr}");

    // Exported networks contain the setting.
    let run = world.text("bright");
    let expected = features(&world, &run, &shards, "run.npy", &[]);
    for (format, name) in [("timm", "timm"), ("safetensors", "a.safetensors")] {
        let out = world.text(name);
        ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &out, "--format", format]));
        let same = features(&world, &out, &shards, &format!("{format}.npy"), &[]);
        assert!(same == expected, "{format}: other features");
        let other = features(&world, &out, &shards, &format!("{format}13.npy"), &["--bits-used", "13"]);
        assert!(other != expected, "{format}");
    }
    let card = fs::read_to_string(world.path("timm/README.md")).unwrap();
    assert!(card.contains("use 12 of them: 4095 becomes 65535"), "{card}");
    let flags = ["embed", "--checkpoint", &run, "--shards", &shards, "--out", "x.npy", "--bits-used", "12"];
    assert!(fails(&world.ocelli(&flags), 2).contains("data.bits_used"));
}

/// Returns a NumPy file of an array `[2, 24, 20]` in f32.
fn npy(values: &[f32]) -> Vec<u8> {
    let mut header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 24, 20), }".to_string();
    let length = (10 + header.len() + 1).next_multiple_of(64);
    header.push_str(&" ".repeat(length - 10 - header.len() - 1));
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    for value in values {
        bytes.extend(value.to_le_bytes());
    }
    bytes
}

/// Tiles of floating point in which -9999 and NaN stand for no data.
#[test]
fn pixels_without_data_are_filled_and_left_out() {
    const N_PIXELS: usize = 24 * 20;
    let world = World::new(4);
    let folder = world.path("tiles");
    fs::create_dir_all(&folder).unwrap();
    let mut sums = [0.0f64; 2];
    let mut counts = [0.0f64; 2];
    for i in 0..16usize {
        let mut values = Vec::new();
        for at in 0..2 * N_PIXELS {
            let value = ((at * (i + 3)) % 97) as f32 / 97.0;
            match at % 41 {
                3 => values.push(f32::NAN),
                7 => values.push(-9999.0),
                _ => {
                    values.push(value);
                    sums[at / N_PIXELS] += f64::from(value);
                    counts[at / N_PIXELS] += 1.0;
                }
            }
        }
        fs::write(folder.join(format!("t{i:02}.npy")), npy(&values)).unwrap();
    }
    let shards = world.text("shards");
    ok(&world.ocelli(&["shards", "pack", &world.text("tiles"), "--out", &shards]));
    let format = ["--channels", "2", "--bits", "32", "--json"];
    let stats = [&["shards", "stats", &shards][..], &format].concat();
    assert_eq!(
        json_of(&world.ocelli(&stats))["bad"],
        16,
        "NaN is refused unless the recipe says what it gets"
    );
    let measured = world.ocelli(&[&stats[..], &["--no-data", "-9999"]].concat());
    let line = json_of(&measured);
    assert_eq!(line["bad"], 0);
    for channel in 0..2 {
        let mean = line["mean"][channel].as_f64().unwrap();
        let expected = sums[channel] / counts[channel];
        assert!((mean - expected).abs() < 1e-6, "channel {channel}: {mean} in place of {expected}");
    }
    let stdout = String::from_utf8_lossy(&measured.stdout);
    assert!(stdout.contains("no_data = { value = -9999, fill = \"mean\" }"), "{stdout}");
    let constants = stdout.lines().find_map(|line| line.trim().strip_prefix("normalization = ")).unwrap();

    let normalization = format!("data.normalization={constants}");
    let mut sets = vec!["--set", "optim.length={steps=2}", "--set", "optim.batch_size=8"];
    for set in ["data.channels=2", "data.bits=32", "views.channels={}", &normalization] {
        sets.extend(["--set", set]);
    }
    let refused = pretrain(&world, &shards, "refused", &sets);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("data.no_data"), "{refused:?}");
    for (workdir, fill) in [("mean", "'mean'"), ("number", "0.5")] {
        let set = format!("data.no_data={{ value = -9999, fill = {fill} }}");
        ok(&pretrain(&world, &shards, workdir, &[&sets[..], &["--set", &set]].concat()));
    }
}
