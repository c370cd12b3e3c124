//! Images with masks and with several classes.

use std::fs;

use crate::evaluation::probe;
use crate::messages::check_message;
use crate::support::{World, encode_png, fails, json_of, ok, shard_writer};

/// Packs images that are dark on the left and bright on the right of a border, with the members
/// that `extra_members` returns for the number of an image and its border.
fn pack_bordered(
    world: &World,
    name: &str,
    count: u32,
    extra_members: impl Fn(u32, u32) -> Vec<(&'static str, Vec<u8>)>,
) {
    let folder = world.path(name);
    fs::create_dir_all(&folder).unwrap();
    let mut writer = shard_writer(&folder, name);
    for i in 0..count {
        let border = 4 + (i * 7) % 9;
        let picture = image::RgbImage::from_fn(16, 16, |x, y| {
            let noise = ((x * 31 + y * 17 + i * 13) % 23) as u8;
            image::Rgb([if x < border { noise } else { 200 + noise }; 3])
        });
        let mut members = vec![("png", encode_png(&picture.into()))];
        members.extend(extra_members(i, border));
        let borrowed: Vec<(&str, &[u8])> =
            members.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
        writer.add(&format!("{i:08}"), &borrowed).unwrap();
    }
    writer.finish().unwrap();
}

/// Draws a mask: class 0 left of the border, 1 right of it, and the first row ignored.
fn mask(border: u32) -> Vec<u8> {
    let mask = image::GrayImage::from_fn(16, 16, |x, y| {
        image::Luma([if y == 0 { 255 } else { u8::from(x >= border) }])
    });
    encode_png(&mask.into())
}

fn mask_member(_number: u32, border: u32) -> Vec<(&'static str, Vec<u8>)> {
    vec![("seg.png", mask(border))]
}

#[test]
fn segmentation_reads_masks_and_needs_no_classes() {
    let world = World::new(20);
    ok(&world.pretrain("run", &[]));
    pack_bordered(&world, "train", 40, mask_member);
    // An image without a mask is left out.
    pack_bordered(&world, "test", 20, |i, border| if i == 3 { Vec::new() } else { mask_member(i, border) });
    let flags = ["--protocol", "segmentation", "--set", "segmentation.rate=0.03", "--resize-px", "16"];
    let output = probe(&world, "train", "test", &flags);
    ok(&output);
    let report = json_of(&output);
    let scores = &report["networks"]["teacher"]["segmentation"];
    assert!(scores["mIoU"].as_f64().unwrap() > 75.0, "{scores}");
    assert_eq!(report["train"]["images"], 40);
    assert_eq!(report["test"]["images"], 19);
    let mut n_pixels = 0;
    for row in scores["confusion"].as_array().unwrap() {
        for n in row.as_array().unwrap() {
            n_pixels += n.as_u64().unwrap();
        }
    }
    assert_eq!(n_pixels, 19 * 16 * 15, "pixels of class 255 do not count");
    let evaluations = fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    assert!(evaluations.contains("mIoU"), "{evaluations}");

    pack_bordered(&world, "bad", 2, |_, _| vec![("seg.png", b"no picture".to_vec())]);
    let output = probe(&world, "train", "bad", &["--protocol", "segmentation"]);
    check_message("several::segmentation_reads_masks_and_needs_no_classes.mask", &fails(&output, 3));
    pack_bordered(&world, "small", 2, |_, _| {
        let picture = image::GrayImage::from_fn(8, 8, |x, _| image::Luma([u8::from(x > 3)]));
        vec![("seg.png", encode_png(&picture.into()))]
    });
    let output = probe(&world, "train", "small", &["--protocol", "segmentation"]);
    check_message("several::segmentation_reads_masks_and_needs_no_classes.size", &fails(&output, 3));
    pack_bordered(&world, "binary", 4, |_, _| {
        let picture = image::GrayImage::from_fn(16, 16, |x, _| image::Luma([if x > 7 { 255 } else { 0 }]));
        vec![("mask.png", encode_png(&picture.into()))]
    });
    let output = probe(&world, "binary", "test", &["--protocol", "segmentation"]);
    check_message("several::segmentation_reads_masks_and_needs_no_classes.one_class", &fails(&output, 3));
    let output = probe(&world, "train", "test", &["--protocol", "segmentation,knn"]);
    check_message("several::segmentation_reads_masks_and_needs_no_classes.mixed", &fails(&output, 2));
    pack_bordered(&world, "plain", 2, |_, _| Vec::new());
    let output = probe(&world, "train", "plain", &["--protocol", "segmentation"]);
    check_message("several::segmentation_reads_masks_and_needs_no_classes.no_mask", &fails(&output, 3));
}

/// Member with the classes of an image, "left" if the border is on the left and "even" if the
/// number is even: none, one or both.
fn label_member(i: u32, border: u32) -> Vec<(&'static str, Vec<u8>)> {
    let mut labels = Vec::new();
    if border < 8 {
        labels.push("left");
    }
    if i.is_multiple_of(2) {
        labels.push("even");
    }
    if i.is_multiple_of(3) {
        vec![("json", serde_json::json!({ "labels": labels }).to_string().into_bytes())]
    } else {
        vec![("cls", labels.join("\n").into_bytes())]
    }
}

#[test]
fn several_classes_give_mean_average_precision() {
    let world = World::new(20);
    ok(&world.pretrain("run", &[]));
    pack_bordered(&world, "train", 60, label_member);
    pack_bordered(&world, "test", 36, |i, border| label_member(i + 1, border));
    let output = probe(&world, "train", "test", &["--protocol", "knn", "--set", "knn.k=5"]);
    ok(&output);
    let scores = &json_of(&output)["networks"]["teacher"]["knn_5"];
    // Classes are in the order of their names: even, left.
    let even = scores["by_class"][0].as_f64().unwrap();
    let left = scores["by_class"][1].as_f64().unwrap();
    assert!(left > 90.0 && left > even, "{scores}");
    assert!((scores["mAP"].as_f64().unwrap() - (even + left) / 2.0).abs() < 1e-9);
    // In detection sets, each box names a class, so that classes are repeated.
    pack_bordered(&world, "boxes", 8, |i, _| {
        vec![("json", serde_json::json!({ "labels": [i % 2, i % 2] }).to_string().into_bytes())]
    });
    let report = json_of(&probe(&world, "boxes", "boxes", &["--protocol", "knn", "--set", "knn.k=1"]));
    assert_eq!(report["networks"]["teacher"]["knn_1"]["accuracy"], 100.0, "{report}");
    let output = probe(&world, "train", "test", &["--protocol", "logreg"]);
    check_message("several::several_classes_give_mean_average_precision", &fails(&output, 2));
}
