//! Parquet files of images, in the layout of the datasets of Hugging Face, in place of shards.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use pipeline::PipelineError;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, ok, open};

/// Creates the Parquet file at `path` with columns of the schema `message`.
fn create(path: &Path, message: &str, properties: WriterProperties) -> SerializedFileWriter<File> {
    let schema = Arc::new(parquet::schema::parser::parse_message_type(message).unwrap());
    SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap()
}

/// Writes the next column of `group`. A column that may lack values has the level of definition of
/// each row, and one of lists also that of repetition.
fn write_column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: &[T::T],
    definitions: Option<&[i16]>,
    repetitions: Option<&[i16]>,
) {
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<T>().write_batch(values, definitions, repetitions).unwrap();
    column.close().unwrap();
}

/// Writes the next column of `group`, of bytes that no row lacks.
fn write_bytes(group: &mut SerializedRowGroupWriter<'_, File>, rows: &[Vec<u8>]) {
    let values: Vec<ByteArray> = rows.iter().map(|row| ByteArray::from(row.clone())).collect();
    write_column::<ByteArrayType>(group, &values, None, None);
}

/// Writes a Parquet file in the layout of the datasets of Hugging Face: a group of bytes and path,
/// a class number, and a caption.
fn write_parquet(path: &Path, images: &[Vec<u8>], has_images: bool) {
    let labels: Vec<i64> = (0..images.len() as i64).map(|i| i % 2).collect();
    write_groups(path, images, &labels, has_images);
}

/// Writes such a file with the classes 0 (cat) and 1 (dog), or none for a negative number.
pub(crate) fn write_labeled(path: &Path, images: &[Vec<u8>], labels: &[i64]) {
    write_groups(path, images, labels, true);
}

fn write_groups(path: &Path, images: &[Vec<u8>], labels: &[i64], has_images: bool) {
    let column = if has_images { "image" } else { "document" };
    let bytes = if has_images { "bytes" } else { "text" };
    let schema = format!(
        "message schema {{ optional group {column} {{ optional binary {bytes}; optional binary path (UTF8); }}
         optional int64 label; optional binary caption (UTF8); }}"
    );
    let names = r#"{"info":{"features":{"label":{"names":["cat","dog"],"_type":"ClassLabel"}}}}"#;
    let names = KeyValue::new("huggingface".to_string(), names.to_string());
    let properties = WriterProperties::builder()
        .set_compression(parquet::basic::Compression::SNAPPY)
        .set_key_value_metadata(Some(vec![names]))
        .build();
    let mut writer = create(path, &schema, properties);
    let mut group = writer.next_row_group().unwrap();
    let n = images.len();
    // An empty image means that its row has none.
    let levels: Vec<i16> = images.iter().map(|image| if image.is_empty() { 0 } else { 2 }).collect();
    let mut encoded_images = Vec::new();
    let mut paths = Vec::new();
    for (i, image) in images.iter().enumerate() {
        if !image.is_empty() {
            encoded_images.push(ByteArray::from(image.clone()));
            paths.push(ByteArray::from(format!("path {i}").as_str()));
        }
    }
    for values in [encoded_images, paths] {
        write_column::<ByteArrayType>(&mut group, &values, Some(&levels), None);
    }
    write_column::<Int64Type>(&mut group, labels, Some(&vec![1; n]), None);
    let captions: Vec<ByteArray> = (0..n).map(|i| ByteArray::from(format!("caption {i}").as_str())).collect();
    write_column::<ByteArrayType>(&mut group, &captions, Some(&vec![1; n]), None);
    group.close().unwrap();
    writer.close().unwrap();
}

/// Encoded image of a sample.
fn read_image(dataset: &pipeline::Dataset, id: u64) -> Vec<u8> {
    dataset.read(pipeline::SampleId(id)).unwrap().image.bytes().to_vec()
}

/// Parquet files of images are read like shards, with the names of their classes, their columns,
/// and one index for all later runs.
#[test]
fn parquet_files_are_read_like_shards() {
    let world = World::new(6);
    let images: Vec<Vec<u8>> = (0..6).map(|id| read_image(&world.dataset(), id)).collect();
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
    assert_eq!((gap.n_samples(), read_image(&gap, 2)), (3, images[1].clone()));
    assert!(gap.read(pipeline::SampleId(1)).unwrap_err().is_sample_error());

    let complete = std::fs::read(world.path("hub/train-00000.parquet")).unwrap();
    std::fs::write(world.path("half.parquet"), &complete[..complete.len() / 2]).unwrap();
    write_parquet(&world.path("text.parquet"), &images[..2], false);
    for (name, words) in [("half.parquet", ""), ("text.parquet", "holds images")] {
        let error = open(&world, &world.text(name)).unwrap_err();
        let PipelineError::NotParquet { path, reason } = &error else { panic!("{error}") };
        assert!(path.ends_with(name) && reason.contains(words), "{error}");
    }
}

/// Writes a file of images with lists of classes: two, none, nothing that is known, and one.
fn write_lists(path: &Path, images: &[Vec<u8>]) {
    let schema = "message schema { required binary image; \
        optional group tags (LIST) { repeated group list { optional int64 element; } } }";
    let names = r#"{"info":{"features":{"tags":{"feature":{"names":["cat","dog"],"_type":"ClassLabel"},
        "_type":"List"}}}}"#;
    let names = KeyValue::new("huggingface".to_string(), names.to_string());
    let properties = WriterProperties::builder().set_key_value_metadata(Some(vec![names])).build();
    let mut writer = create(path, schema, properties);
    let mut group = writer.next_row_group().unwrap();
    write_bytes(&mut group, images);
    // A list may hold a value that is not known.
    let definitions = [3, 3, 1, 0, 2, 3];
    let repetitions = [0, 1, 0, 0, 0, 1];
    write_column::<Int64Type>(&mut group, &[1, 0, 1], Some(&definitions), Some(&repetitions));
    group.close().unwrap();
    writer.close().unwrap();
}

/// A list of classes is several classes, by their names.
#[test]
fn lists_of_classes_are_classes() {
    let world = World::new(4);
    let images: Vec<Vec<u8>> = (0..4).map(|id| read_image(&world.dataset(), id)).collect();
    write_lists(&world.path("lists.parquet"), &images);
    let (set, _) = subset(&world, "lists.parquet", "tags", &world.text("unpacked"));
    let mut classes = Vec::new();
    for id in (0..set.n_samples()).map(pipeline::SampleId) {
        classes.push(set.classes(id).unwrap());
    }
    assert_eq!(classes, [vec!["dog", "cat"], vec![], vec![], vec!["dog"]]);
    let stated: Vec<bool> = (0..4).map(|id| set.states_no_class(pipeline::SampleId(id)).unwrap()).collect();
    assert_eq!(stated, [false, true, false, false]);
}

/// Writes a file of images with three columns that may be their classes: integers, texts that may
/// be missing, and numbers with a point.
fn write_candidates(path: &Path, images: &[Vec<u8>], species: &[Option<&str>], scores: &[f64]) {
    let schema = "message schema { required binary image; required int64 label; \
        optional binary species (UTF8); required double score; }";
    let mut writer = create(path, schema, WriterProperties::default());
    let mut group = writer.next_row_group().unwrap();
    write_bytes(&mut group, images);
    write_column::<Int64Type>(&mut group, &vec![7; images.len()], None, None);
    let levels: Vec<i16> = species.iter().map(|name| i16::from(name.is_some())).collect();
    let names: Vec<ByteArray> = species.iter().flatten().map(|name| ByteArray::from(*name)).collect();
    write_column::<ByteArrayType>(&mut group, &names, Some(&levels), None);
    write_column::<DoubleType>(&mut group, scores, None, None);
    group.close().unwrap();
    writer.close().unwrap();
}

/// A row without a class in the column that is named is of an unknown class, even if an empty list
/// under `label` would state that it is of none.
#[test]
fn an_empty_list_in_another_column_states_nothing() {
    let world = World::new(2);
    let images: Vec<Vec<u8>> = (0..2).map(|id| read_image(&world.dataset(), id)).collect();
    let schema = "message schema { required binary image; optional binary species (UTF8); \
        optional group label (LIST) { repeated group list { optional int64 element; } } }";
    let mut writer = create(&world.path("set.parquet"), schema, WriterProperties::default());
    let mut group = writer.next_row_group().unwrap();
    write_bytes(&mut group, &images);
    write_column::<ByteArrayType>(&mut group, &[ByteArray::from("cat")], Some(&[1, 0]), None);
    write_column::<Int64Type>(&mut group, &[], Some(&[1, 1]), Some(&[0, 0]));
    group.close().unwrap();
    writer.close().unwrap();
    for column in ["species", "label"] {
        let (set, _) = subset(&world, "set.parquet", column, &world.text(column));
        let second = pipeline::SampleId(1);
        assert!(set.classes(second).unwrap().is_empty());
        assert_eq!(set.states_no_class(second).unwrap(), column == "label");
    }
}

/// A row without a class in the column that is named has none, whatever is under `label`, and
/// values that are no classes are told, as in a list.
#[test]
fn the_named_column_is_read_like_that_of_a_list() {
    let world = World::new(4);
    let images: Vec<Vec<u8>> = (0..4).map(|id| read_image(&world.dataset(), id)).collect();
    let species = [Some("cat"), None, Some(""), Some("dog")];
    write_candidates(&world.path("set.parquet"), &images, &species, &[1.0, 0.25, 2.0, -1.0]);
    let mut found = Vec::new();
    for column in ["species", "score"] {
        let out = world.text(column);
        let (set, stderr) = subset(&world, "set.parquet", column, &out);
        assert_eq!(stderr.contains("in the column of classes"), column == "score", "{stderr}");
        for id in (0..4).map(pipeline::SampleId) {
            assert!(!set.states_no_class(id).unwrap(), "nothing is known");
            found.push(set.classes(id).unwrap().join(" "));
        }
    }
    assert_eq!(found, ["cat", "", "", "dog", "1", "", "2", ""]);
}

/// Writes the four samples of the Parquet file `name`, whose classes are in `column`, as shards in
/// the folder `out`, and opens them; returns standard error, too.
fn subset(world: &World, name: &str, column: &str, out: &str) -> (pipeline::Dataset, String) {
    let file = world.text(name);
    // The cache of the tests knows neither file.
    let cache = world.text(&format!("cache-{column}"));
    let args = ["shards", "subset", &file, "--count", "4", "--label-column", column, "--out", out];
    let stderr = ok(&world.ocelli_with(&args, &[("OCELLI_CACHE", &cache)]));
    (open(world, out).unwrap(), stderr)
}

/// Writes a file in the layout of other tools: bytes of images without paths and two columns of
/// classes, compressed by `codec`.
fn write_plain(path: &Path, images: &[Vec<u8>], codec: parquet::basic::Compression) {
    let schema = "message schema { required binary notes; required binary image_bytes; required int64 \
        fine_label; required int64 coarse_label; }";
    let properties = WriterProperties::builder().set_compression(codec).build();
    let mut writer = create(path, schema, properties);
    let mut group = writer.next_row_group().unwrap();
    write_bytes(&mut group, &vec![b"no image".to_vec(); images.len()]);
    write_bytes(&mut group, images);
    for factor in [1, 10] {
        let labels: Vec<i64> = (0..images.len() as i64).map(|i| i * factor).collect();
        write_column::<Int64Type>(&mut group, &labels, None, None);
    }
    group.close().unwrap();
    writer.close().unwrap();
}

/// Lists the samples of the Parquet file `plain.parquet` with more flags.
fn list(world: &World, more: &[&str]) -> std::process::Output {
    let name = world.text("plain.parquet");
    world.ocelli_with(&[&["shards", "ls", &name], more].concat(), &[("OCELLI_CACHE", &world.text("c"))])
}

/// Columns of images are recognized by their bytes, in every common compression; a class is taken
/// from the column of a flag.
#[test]
fn columns_are_recognized_by_content_or_given_by_flags() {
    use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
    let world = World::new(3);
    let images: Vec<Vec<u8>> = (0..3).map(|id| read_image(&world.dataset(), id)).collect();
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
            assert_eq!(&read_image(&set, id as u64), image, "{codec:?}");
        }
        assert_eq!(set.label(pipeline::SampleId(1)).unwrap(), None);
    }
    let stderr = ok(&list(&world, &[]));
    check_message(
        "parquet_sets::columns_are_recognized_by_content_or_given_by_flags.label",
        &lines_with(&stderr, "--label-column"),
    );
    let output = list(&world, &["--image-column", "picture"]);
    check_message(
        "parquet_sets::columns_are_recognized_by_content_or_given_by_flags.image",
        &fails(&output, 3),
    );
    let output = list(&world, &["--label-column", "coarse_label"]);
    ok(&output);
    let listing = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(listing.matches("cls:").count(), 3, "{listing}");
    assert!(listing.contains("cls:2"), "classes 10 and 20 have two digits: {listing}");
}
