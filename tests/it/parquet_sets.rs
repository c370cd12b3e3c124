//! Parquet files of images, as the datasets of Hugging Face have them, in place of shards.

use std::path::Path;
use std::sync::Arc;

use crate::support::{World, ok, open};

/// Writes a Parquet file as the datasets of Hugging Face are: a group of bytes and path, a class
/// number, and a caption.
fn write_parquet(path: &Path, images: &[Vec<u8>], has_images: bool) {
    let labels: Vec<i64> = (0..images.len() as i64).map(|i| i % 2).collect();
    write_groups(path, images, &labels, has_images);
}

/// Writes such a file with the classes 0 (cat) and 1 (dog), or none for a negative number.
pub(crate) fn write_labeled(path: &Path, images: &[Vec<u8>], labels: &[i64]) {
    write_groups(path, images, labels, true);
}

fn write_groups(path: &Path, images: &[Vec<u8>], labels: &[i64], has_images: bool) {
    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::metadata::KeyValue;
    use parquet::file::properties::WriterProperties;
    let column = if has_images { "image" } else { "document" };
    let bytes = if has_images { "bytes" } else { "text" };
    let schema = format!(
        "message schema {{ optional group {column} {{ optional binary {bytes}; optional binary path (UTF8); }}
         optional int64 label; optional binary caption (UTF8); }}"
    );
    let schema = Arc::new(parquet::schema::parser::parse_message_type(&schema).unwrap());
    let names = r#"{"info":{"features":{"label":{"names":["cat","dog"],"_type":"ClassLabel"}}}}"#;
    let names = KeyValue::new("huggingface".to_string(), names.to_string());
    let properties = WriterProperties::builder()
        .set_compression(parquet::basic::Compression::SNAPPY)
        .set_key_value_metadata(Some(vec![names]))
        .build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer =
        parquet::file::writer::SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let n = images.len();
    let texts =
        |name: &str| (0..n).map(|i| ByteArray::from(format!("{name} {i}").as_str())).collect::<Vec<_>>();
    // An empty image stands for none.
    let levels: Vec<i16> = images.iter().map(|image| if image.is_empty() { 0 } else { 2 }).collect();
    let there = |values: Vec<ByteArray>| -> Vec<ByteArray> {
        values.into_iter().zip(&levels).filter(|(_, level)| **level > 0).map(|(value, _)| value).collect()
    };
    let images: Vec<ByteArray> = images.iter().map(|image| ByteArray::from(image.clone())).collect();
    for values in [there(images), there(texts("path"))] {
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
    }
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(labels, Some(&vec![1; n]), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&texts("caption"), Some(&vec![1; n]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

/// Encoded image of a sample.
fn image_of(dataset: &pipeline::Dataset, id: u64) -> Vec<u8> {
    dataset.read(pipeline::SampleId(id)).unwrap().image.bytes().to_vec()
}

/// Parquet files of images are shards: with their classes by name, their columns, and one index for
/// all later runs.
#[test]
fn parquet_files_are_shards() {
    let world = World::new(6);
    let images: Vec<Vec<u8>> = (0..6).map(|id| image_of(&world.dataset(), id)).collect();
    std::fs::create_dir(world.path("hub")).unwrap();
    write_parquet(&world.path("hub/train-00000.parquet"), &images[..4], true);
    write_parquet(&world.path("hub/train-00001.parquet"), &images[4..], true);
    let hub = open(&world, &world.text("hub")).unwrap();
    assert_eq!(hub.n_samples(), 6);
    for (id, image) in images.iter().enumerate() {
        let id = pipeline::SampleId(id as u64);
        assert_eq!(hub.read(id).unwrap().image.bytes(), image);
        let columns: serde_json::Value =
            serde_json::from_slice(&hub.member(id, &["json"]).unwrap().unwrap()).unwrap();
        assert!(columns["caption"].as_str().unwrap().starts_with("caption "), "{columns}");
        assert!(columns["image.path"].as_str().unwrap().starts_with("path "), "{columns}");
    }
    assert_eq!(hub.classes(pipeline::SampleId(1)).unwrap(), ["dog"]);
    let again = open(&world, &world.text("hub")).unwrap();
    assert_eq!(again.fingerprint().unwrap(), hub.fingerprint().unwrap());
    ok(&world.pretrain("run", &["--shards", &world.text("hub"), "--set", "optim.length={steps=2}"]));

    // A row without an image is one bad sample.
    write_parquet(&world.path("gap.parquet"), &[images[0].clone(), Vec::new(), images[1].clone()], true);
    let gap = open(&world, &world.text("gap.parquet")).unwrap();
    assert_eq!((gap.n_samples(), image_of(&gap, 2)), (3, images[1].clone()));
    assert!(gap.read(pipeline::SampleId(1)).unwrap_err().is_sample_error());

    let whole = std::fs::read(world.path("hub/train-00000.parquet")).unwrap();
    std::fs::write(world.path("half.parquet"), &whole[..whole.len() / 2]).unwrap();
    write_parquet(&world.path("text.parquet"), &images[..2], false);
    for (name, reason) in [("half", "cannot be used"), ("text", "holds images")] {
        let error = open(&world, &world.text(&format!("{name}.parquet"))).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains(name), "{error}");
    }
}

/// Writes a file as those of other tools are: bytes of images alone, two columns of classes,
/// compressed by `codec`.
fn write_plain(path: &Path, images: &[Vec<u8>], codec: parquet::basic::Compression) {
    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::properties::WriterProperties;
    let schema = "message schema { required binary notes; required binary image_bytes; required int64 fine_label; required int64 coarse_label; }";
    let schema = Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder().set_compression(codec).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer =
        parquet::file::writer::SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let notes: Vec<ByteArray> = images.iter().map(|_| ByteArray::from("no image")).collect();
    let images: Vec<ByteArray> = images.iter().map(|image| ByteArray::from(image.clone())).collect();
    for values in [&notes, &images] {
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(values, None, None).unwrap();
        column.close().unwrap();
    }
    for factor in [1, 10] {
        let labels: Vec<i64> = (0..images.len() as i64).map(|i| i * factor).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&labels, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

/// Columns of images are known by their bytes, in every usual compression; a class is taken from
/// the column that is named.
#[test]
fn columns_are_found_by_content_or_named() {
    use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
    let world = World::new(3);
    let images: Vec<Vec<u8>> = (0..3).map(|id| image_of(&world.dataset(), id)).collect();
    let path = world.path("plain.parquet");
    let name = world.text("plain.parquet");
    for codec in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::LZ4_RAW,
        Compression::BROTLI(BrotliLevel::default()),
        Compression::ZSTD(ZstdLevel::default()),
    ] {
        write_plain(&path, &images, codec);
        let set = open(&world, &name).unwrap();
        for (id, image) in images.iter().enumerate() {
            assert_eq!(&image_of(&set, id as u64), image, "{codec:?}");
        }
        assert_eq!(set.label(pipeline::SampleId(1)).unwrap(), None);
    }
    let ls = |more: &[&str]| {
        world.ocelli_with(&[&["shards", "ls", &name], more].concat(), &[("OCELLI_CACHE", &world.text("c"))])
    };
    let said = ok(&ls(&[]));
    assert!(said.contains("--label-column takes one of fine_label, coarse_label"), "{said}");
    let said = crate::support::fails(&ls(&["--image-column", "picture"]), 3);
    assert!(
        said.contains("no column picture; it has notes, image_bytes, fine_label, coarse_label"),
        "{said}"
    );
    let listed = ls(&["--label-column", "coarse_label"]);
    ok(&listed);
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert_eq!(listed.matches("cls:").count(), 3, "{listed}");
    assert!(listed.contains("cls:2"), "classes 10 and 20 have two digits: {listed}");
}
