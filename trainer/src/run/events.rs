//! TensorBoard events of a run: scalars, pictures, text, and the recipe as hyperparameters. The
//! files are in the work directory itself, so that the run has the name of its folder.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crc_fast::CrcAlgorithm;
use pipeline::magic::PNG;
use prost::Message;
use xxhash_rust::xxh3::xxh3_64;

use super::clock::now_s;
use super::event_message::{
    DataClass, Event, HparamValue, HparamsData, PluginData, Session, Summary, SummaryImage, SummaryMetadata,
    SummaryValue, Tensor, TensorType,
};
use crate::error::TrainError;

/// Largest number of event files that one process creates in one second.
const MAX_FILES_A_SECOND: u32 = 1000;

/// Largest length of the tag of a number, in characters: the sidebar of TensorBoard shows no more.
const MAX_TAG_LEN: usize = 40;

/// A file of events.
pub struct Events {
    path: PathBuf,
    file: File,
}

impl Events {
    /// Creates a new file in `workdir`; existing files stay as they are.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn open(workdir: &Path) -> Result<Self, TrainError> {
        let now = now_s();
        let (path, file) = create(workdir, now)?;
        let version =
            Event { wall_time: now, file_version: Some("brain.Event:2".into()), ..Event::default() };
        let mut events = Self { path, file };
        events.write(&version)?;
        Ok(events)
    }

    /// Writes a number. A name that is too long for a tag is shortened, and describes the tag.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn scalar(&mut self, step: u64, name: &str, value: f64) -> Result<(), TrainError> {
        let tag = short_tag(name);
        let metadata = if tag == name { None } else { Some(description(name)) };
        let simple_value = Some(value as f32);
        self.write_value(step, SummaryValue { tag, simple_value, metadata, ..SummaryValue::default() })
    }

    /// Writes text in Markdown.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn text(&mut self, step: u64, name: &str, markdown: &str) -> Result<(), TrainError> {
        let tensor = Tensor {
            dtype: TensorType::String.into(),
            string_val: vec![markdown.as_bytes().to_vec()],
            ..Tensor::default()
        };
        let tag = format!("{name}/text_summary");
        self.write_value(step, plugin_value("text", tag, Vec::new(), tensor))
    }

    /// Writes a picture. `png` are the bytes of a PNG file.
    ///
    /// # Errors
    /// [`TrainError::Io`], also if `png` is not a PNG file.
    pub fn picture(&mut self, step: u64, name: &str, png: &[u8]) -> Result<(), TrainError> {
        let [width, height] = png_size(png).ok_or_else(|| {
            TrainError::io("write", &self.path, io::Error::other(format!("{name} is not a PNG file")))
        })?;
        let image = SummaryImage { height, width, colorspace: 3, encoded_image_string: png.to_vec() };
        let value = SummaryValue { tag: name.into(), image: Some(image), ..SummaryValue::default() };
        self.write_value(step, value)
    }

    /// Writes hyperparameters.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn hyperparameters(&mut self, values: &[(String, toml::Value)]) -> Result<(), TrainError> {
        let hparams = values.iter().map(|(name, value)| (name.clone(), hparam(value))).collect();
        let session = Session { hparams, start_time_secs: now_s() };
        let content = HparamsData { session_start_info: Some(session) }.encode_to_vec();
        let placeholder =
            Tensor { dtype: TensorType::Float.into(), float_val: vec![0.0], ..Tensor::default() };
        let tag = "_hparams_/session_start_info".to_string();
        self.write_value(0, plugin_value("hparams", tag, content, placeholder))
    }

    fn write_value(&mut self, step: u64, value: SummaryValue) -> Result<(), TrainError> {
        let summary = Some(Summary { value: vec![value] });
        self.write(&Event { wall_time: now_s(), step: step as i64, summary, ..Event::default() })
    }

    fn write(&mut self, event: &Event) -> Result<(), TrainError> {
        let written = self.file.write_all(&record(&event.encode_to_vec()));
        written.map_err(|error| TrainError::io("write", &self.path, error))
    }
}

/// Returns `data` as a record of a TFRecord file: its length, a checksum of the length, the data,
/// and a checksum of the data.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(length);
    record.extend(masked_checksum(&length).to_le_bytes());
    record.extend(data);
    record.extend(masked_checksum(data).to_le_bytes());
    record
}

/// Returns the CRC-32C of `data`, rotated and shifted as TFRecord files have it.
fn masked_checksum(data: &[u8]) -> u32 {
    let checksum = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, data) as u32;
    checksum.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Creates a file with a unique name. TensorBoard reads the files of a folder in the order of their
/// names.
fn create(workdir: &Path, now_s: f64) -> Result<(PathBuf, File), TrainError> {
    let process = std::process::id();
    let mut n = 0;
    loop {
        let name = format!("events.out.tfevents.{:010}.ocelli.{process}.{n}", now_s as u64);
        let path = workdir.join(name);
        match File::create_new(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && n < MAX_FILES_A_SECOND => n += 1,
            Err(error) => return Err(TrainError::io("create", &path, error)),
        }
    }
}

/// Creates a value for the plugin `plugin` of TensorBoard.
fn plugin_value(plugin: &str, tag: String, content: Vec<u8>, tensor: Tensor) -> SummaryValue {
    let plugin_data = Some(PluginData { plugin_name: plugin.into(), content });
    let metadata = Some(SummaryMetadata { plugin_data, ..SummaryMetadata::default() });
    SummaryValue { tag, metadata, tensor: Some(tensor), ..SummaryValue::default() }
}

/// Returns `name`, or if it is longer than a tag, the parts of its path that fit, and a hash of the
/// whole.
fn short_tag(name: &str) -> String {
    if name.chars().count() <= MAX_TAG_LEN {
        return name.to_string();
    }
    let hash = format!("-{:06x}", xxh3_64(name.as_bytes()) >> 40);
    let n_kept = MAX_TAG_LEN - hash.len();
    let beginning: String = name.chars().take(n_kept).collect();
    let is_cut_between_parts = name.chars().nth(n_kept) == Some('/');
    let parts = match beginning.rsplit_once('/') {
        Some((parts, _)) if !is_cut_between_parts => parts,
        _ => beginning.as_str(),
    };
    format!("{parts}{hash}")
}

/// Returns the metadata of a number whose tag is described by `text`. Both of TensorBoard's readers
/// show the description: the fast one needs the class of the data, the other the plugin.
fn description(text: &str) -> SummaryMetadata {
    SummaryMetadata {
        plugin_data: Some(PluginData { plugin_name: "scalars".into(), content: Vec::new() }),
        summary_description: text.to_string(),
        data_class: DataClass::Scalar.into(),
    }
}

/// Converts a value of a recipe: a number, a switch, or else text.
fn hparam(value: &toml::Value) -> HparamValue {
    match value {
        toml::Value::Integer(n) => HparamValue { number_value: Some(*n as f64), ..HparamValue::default() },
        toml::Value::Float(x) => HparamValue { number_value: Some(*x), ..HparamValue::default() },
        toml::Value::Boolean(on) => HparamValue { bool_value: Some(*on), ..HparamValue::default() },
        toml::Value::String(text) => {
            HparamValue { string_value: Some(text.clone()), ..HparamValue::default() }
        }
        other => HparamValue { string_value: Some(other.to_string()), ..HparamValue::default() },
    }
}

/// Reads width and height in pixels from the header of a PNG file.
fn png_size(png: &[u8]) -> Option<[i32; 2]> {
    let header = png.strip_prefix(PNG)?;
    if header.get(4..8)? != b"IHDR" {
        return None;
    }
    let width = i32::from_be_bytes(header.get(8..12)?.try_into().ok()?);
    let height = i32::from_be_bytes(header.get(12..16)?.try_into().ok()?);
    Some([width, height])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the events in the files of `folder`, in the order of their names.
    fn read(folder: &Path) -> Vec<Event> {
        let mut paths: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let mut events = Vec::new();
        for path in paths {
            let bytes = std::fs::read(path).unwrap();
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let n_bytes = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
                events.push(Event::decode(&rest[12..12 + n_bytes]).unwrap());
                rest = &rest[16 + n_bytes..];
            }
        }
        events
    }

    #[test]
    fn event_files_of_one_second_have_different_names_and_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let png = {
            let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
            bytes.extend([0, 0, 1, 2, 0, 0, 0, 7]);
            bytes
        };
        for step in [3, 4] {
            let mut events = Events::open(folder.path()).unwrap();
            events.scalar(step, "train/loss", 0.5).unwrap();
            events.text(step, "recipe", "    seed = 1").unwrap();
            events.picture(step, "views", &png).unwrap();
            assert!(events.picture(step, "views", b"GIF89a").is_err());
            let values = [
                ("optim.lr".to_string(), toml::Value::Float(0.25)),
                ("x".into(), toml::Value::Boolean(true)),
            ];
            events.hyperparameters(&values).unwrap();
        }
        let events = read(folder.path());
        assert_eq!(events.len(), 10);
        let mut values: Vec<&SummaryValue> = Vec::new();
        for event in &events {
            values.extend(event.summary.iter().map(|summary| &summary.value[0]));
        }
        assert_eq!((values[0].tag.as_str(), values[0].simple_value), ("train/loss", Some(0.5)));
        assert_eq!(values[1].tensor.as_ref().unwrap().string_val[0], b"    seed = 1");
        let image = values[2].image.as_ref().unwrap();
        assert_eq!((image.width, image.height), (258, 7));
        let plugin = values[3].metadata.as_ref().unwrap().plugin_data.as_ref().unwrap();
        let data = HparamsData::decode(plugin.content.as_slice()).unwrap();
        assert_eq!(data.session_start_info.unwrap().hparams["optim.lr"].number_value, Some(0.25));
    }

    #[test]
    fn tags_have_at_most_forty_characters() {
        let short = "eval/knn_20/cifar/test/evaluated/32px";
        assert_eq!(short_tag(short), short);
        let names = [
            "eval/knn_20/cifar/test/evaluated/32px/cifar/train-5000/temperature-0.07",
            "eval/knn_20/cifar/test/evaluated/32px/cifar/train-5000/temperature-0.1",
            "eval/linear_dinov2_features/a-set-whose-name-is-very-long/evaluated/224px",
            "a_name_without_any_part_that_is_longer_than_a_tag",
        ];
        let tags = names.map(short_tag);
        assert!(tags[0].starts_with("eval/knn_20/cifar/test/evaluated-"), "{tags:?}");
        assert!(tags[2].starts_with("eval/linear_dinov2_features-"), "{tags:?}");
        let distinct: std::collections::HashSet<&String> = tags.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{tags:?}");
        assert!(tags.iter().all(|tag| tag.chars().count() <= MAX_TAG_LEN), "{tags:?}");

        let folder = tempfile::tempdir().unwrap();
        Events::open(folder.path()).unwrap().scalar(3, names[0], 0.5).unwrap();
        let events = read(folder.path());
        let value = &events[1].summary.as_ref().unwrap().value[0];
        assert_eq!((value.tag.as_str(), value.simple_value), (tags[0].as_str(), Some(0.5)));
        assert_eq!(value.metadata.as_ref().unwrap().summary_description, names[0]);
    }

    /// The expected record is the output of TensorBoard 2.21's own writer for this event.
    #[test]
    fn records_are_those_of_tensorboard() {
        let expected: [u8; 41] = [
            25, 0, 0, 0, 0, 0, 0, 0, 139, 241, 8, 40, 9, 0, 0, 0, 0, 0, 0, 248, 63, 16, 3, 42, 12, 10, 10,
            10, 3, 97, 47, 98, 21, 0, 0, 0, 63, 68, 49, 168, 188,
        ];
        let value = SummaryValue { tag: "a/b".into(), simple_value: Some(0.5), ..SummaryValue::default() };
        let summary = Some(Summary { value: vec![value] });
        let event = Event { wall_time: 1.5, step: 3, summary, ..Event::default() };
        assert_eq!(record(&event.encode_to_vec()), expected);
    }
}
