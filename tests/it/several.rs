//! Images with masks and with several classes.

use std::fs;

use pipeline::shard::write::{ShardLimits, ShardWriter};

use crate::evaluation::probe;
use crate::support::{World, fails, json_of, ok};

/// Packs images that are dark on the left and bright on the right of a border, with members that
/// `more` derives from the number of the image and the border.
fn pack_bordered(
    world: &World,
    name: &str,
    count: u32,
    more: impl Fn(u32, u32) -> Vec<(&'static str, Vec<u8>)>,
) {
    let folder = world.path(name);
    fs::create_dir_all(&folder).unwrap();
    let mut writer =
        ShardWriter::new(&folder, name, ShardLimits { max_samples: 1000, max_bytes: 1 << 30 }).unwrap();
    for i in 0..count {
        let border = 4 + (i * 7) % 9;
        let picture = image::RgbImage::from_fn(16, 16, |x, y| {
            let noise = ((x * 31 + y * 17 + i * 13) % 23) as u8;
            image::Rgb([if x < border { noise } else { 200 + noise }; 3])
        });
        let mut members = vec![("png", png_of(&picture.into()))];
        members.extend(more(i, border));
        let borrowed: Vec<(&str, &[u8])> =
            members.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
        writer.add(&format!("{i:08}"), &borrowed).unwrap();
    }
    writer.finish().unwrap();
}

fn png_of(picture: &image::DynamicImage) -> Vec<u8> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

/// Draws a mask: class 0 left of the border, 1 right of it, and the first row ignored.
fn mask(border: u32) -> Vec<u8> {
    let class = |x: u32, y: u32| image::Luma([if y == 0 { 255 } else { u8::from(x >= border) }]);
    png_of(&image::GrayImage::from_fn(16, 16, class).into())
}

#[test]
fn segmentation_reads_masks_and_needs_no_classes() {
    let world = World::new(20);
    ok(&world.pretrain("run", &[]));
    let masked = |_: u32, border: u32| vec![("seg.png", mask(border))];
    pack_bordered(&world, "train", 40, masked);
    // An image without a mask is left out.
    pack_bordered(&world, "test", 20, |i, border| if i == 3 { Vec::new() } else { masked(i, border) });
    let whole = ["--protocol", "segmentation", "--set", "segmentation.rate=0.03", "--resize-px", "16"];
    let output = probe(&world, "train", "test", &whole);
    ok(&output);
    let said = json_of(&output);
    let number = &said["networks"]["teacher"]["segmentation"];
    let value = number["mIoU"].as_f64().unwrap();
    assert!(value > 75.0, "{number}");
    assert_eq!((&said["train"]["images"], &said["test"]["images"]), (&40.into(), &19.into()));
    let pixels: u64 = number["confusion"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|row| row.as_array().unwrap())
        .map(|n| n.as_u64().unwrap())
        .sum();
    assert_eq!(pixels, 19 * 16 * 15, "pixels of class 255 do not count");
    let kept = fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    assert!(kept.contains("mIoU"), "{kept}");

    pack_bordered(&world, "bad", 2, |_, _| vec![("seg.png", b"no picture".to_vec())]);
    let refused = fails(&probe(&world, "train", "bad", &["--protocol", "segmentation"]), 3);
    assert!(refused.contains("00000000") && refused.contains("mask"), "{refused}");
    pack_bordered(&world, "small", 2, |_, _| {
        let picture = image::GrayImage::from_fn(8, 8, |x, _| image::Luma([u8::from(x > 3)]));
        vec![("seg.png", png_of(&picture.into()))]
    });
    let refused = fails(&probe(&world, "train", "small", &["--protocol", "segmentation"]), 3);
    assert!(refused.contains("8 x 8 pixels, its image 16 x 16"), "{refused}");
    pack_bordered(&world, "binary", 4, |_, _| {
        let picture = image::GrayImage::from_fn(16, 16, |x, _| image::Luma([if x > 7 { 255 } else { 0 }]));
        vec![("mask.png", png_of(&picture.into()))]
    });
    let refused = fails(&probe(&world, "binary", "test", &["--protocol", "segmentation"]), 3);
    assert!(refused.contains("0 and 255"), "{refused}");
    let refused = fails(&probe(&world, "train", "test", &["--protocol", "segmentation,knn"]), 2);
    assert!(refused.contains("one after the other"), "{refused}");
    pack_bordered(&world, "plain", 2, |_, _| Vec::new());
    let refused = fails(&probe(&world, "train", "plain", &["--protocol", "segmentation"]), 3);
    assert!(refused.contains("seg.png"), "{refused}");
}

/// Classes are "the border is on the left" and "the number is even": each image has none, one or
/// both.
#[test]
fn several_classes_give_mean_average_precision() {
    let world = World::new(20);
    ok(&world.pretrain("run", &[]));
    let labeled = |i: u32, border: u32| {
        let labels: Vec<&str> = [(border < 8, "left"), (i.is_multiple_of(2), "even")]
            .into_iter()
            .filter(|(has, _)| *has)
            .map(|(_, name)| name)
            .collect();
        match i % 3 {
            0 => vec![("json", serde_json::json!({ "labels": labels }).to_string().into_bytes())],
            _ => vec![("cls", labels.join("\n").into_bytes())],
        }
    };
    pack_bordered(&world, "train", 60, labeled);
    pack_bordered(&world, "test", 36, |i, border| labeled(i + 1, border));
    let output = probe(&world, "train", "test", &["--protocol", "knn", "--set", "knn.k=5"]);
    ok(&output);
    let number = &json_of(&output)["networks"]["teacher"]["knn_5"];
    let of_class: Vec<f64> =
        number["by_class"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    // Classes are numbered by their names: even, left.
    assert!(of_class[1] > 90.0 && of_class[1] > of_class[0], "{number}");
    assert!((number["mAP"].as_f64().unwrap() - (of_class[0] + of_class[1]) / 2.0).abs() < 1e-9);
    // A box of a detection set names its class each time.
    pack_bordered(&world, "boxes", 8, |i, _| {
        vec![("json", serde_json::json!({ "labels": [i % 2, i % 2] }).to_string().into_bytes())]
    });
    let of_boxes = json_of(&probe(&world, "boxes", "boxes", &["--protocol", "knn", "--set", "knn.k=1"]));
    assert_eq!(of_boxes["networks"]["teacher"]["knn_1"]["accuracy"], 100.0, "{of_boxes}");
    let refused = fails(&probe(&world, "train", "test", &["--protocol", "logreg"]), 2);
    assert!(refused.contains("several classes") && refused.contains("logreg"), "{refused}");
}
