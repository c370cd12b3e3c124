//! TensorBoard events of a run: scalars, pictures, text, and the recipe as hyperparameters. The
//! files are in the work directory itself, so that the run has the name of its folder.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use protobuf::well_known_types::Value as HparamValue;
use protobuf::{Message, RepeatedField};
use tensorboard_proto::event::Event;
use tensorboard_proto::plugin_hparams::{HParamsPluginData, SessionStartInfo};
use tensorboard_proto::summary::{
    Summary, Summary_Image, Summary_Value, SummaryMetadata, SummaryMetadata_PluginData,
};
use tensorboard_proto::tensor::TensorProto;
use tensorboard_proto::types::DataType;
use tensorboard_rs::record_writer::RecordWriter;
use tensorboard_rs::summary;

use super::clock::now_s;
use crate::error::TrainError;

/// Largest number of event files that one process creates in one second.
const MAX_FILES_A_SECOND: u32 = 1000;

/// A file of events.
pub struct Events {
    path: PathBuf,
    writer: RecordWriter<File>,
}

impl Events {
    /// Creates a new file in `workdir`; existing files stay as they are.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn open(workdir: &Path) -> Result<Self, TrainError> {
        let now = now_s();
        let (path, file) = create(workdir, now)?;
        let mut version = Event::new();
        version.set_wall_time(now);
        version.set_file_version("brain.Event:2".into());
        let mut events = Self { path, writer: RecordWriter::new(file) };
        events.write(&version)?;
        Ok(events)
    }

    /// Writes a number.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn scalar(&mut self, step: u64, name: &str, value: f64) -> Result<(), TrainError> {
        self.summary(step, summary::scalar(name, value as f32))
    }

    /// Writes text in Markdown.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn text(&mut self, step: u64, name: &str, markdown: &str) -> Result<(), TrainError> {
        let mut tensor = TensorProto::new();
        tensor.set_dtype(DataType::DT_STRING);
        tensor.set_string_val(RepeatedField::from_vec(vec![markdown.as_bytes().to_vec()]));
        self.summary(step, plugin_summary("text", &format!("{name}/text_summary"), Vec::new(), tensor))
    }

    /// Writes a picture. `png` are the bytes of a PNG file.
    ///
    /// # Errors
    /// [`TrainError::Io`], also if `png` is not a PNG file.
    pub fn picture(&mut self, step: u64, name: &str, png: &[u8]) -> Result<(), TrainError> {
        let [width, height] = png_size(png).ok_or_else(|| {
            TrainError::io("write", &self.path, io::Error::other(format!("{name} is not a PNG file")))
        })?;
        let mut picture = Summary_Image::new();
        picture.set_width(width);
        picture.set_height(height);
        picture.set_colorspace(3);
        picture.set_encoded_image_string(png.to_vec());
        let mut value = Summary_Value::new();
        value.set_tag(name.into());
        value.set_image(picture);
        self.summary(step, single_value_summary(value))
    }

    /// Writes hyperparameters.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn hyperparameters(&mut self, values: &[(String, toml::Value)]) -> Result<(), TrainError> {
        let mut session = SessionStartInfo::new();
        session.set_start_time_secs(now_s());
        session.set_hparams(values.iter().map(|(name, value)| (name.clone(), hparam(value))).collect());
        let mut data = HParamsPluginData::new();
        data.set_session_start_info(session);
        let content = data
            .write_to_bytes()
            .map_err(|error| TrainError::io("write", &self.path, io::Error::other(error)))?;
        let mut placeholder = TensorProto::new();
        placeholder.set_dtype(DataType::DT_FLOAT);
        placeholder.set_float_val(vec![0.0]);
        self.summary(0, plugin_summary("hparams", "_hparams_/session_start_info", content, placeholder))
    }

    fn summary(&mut self, step: u64, summary: Summary) -> Result<(), TrainError> {
        let mut event = Event::new();
        event.set_wall_time(now_s());
        event.set_step(step as i64);
        event.set_summary(summary);
        self.write(&event)
    }

    fn write(&mut self, event: &Event) -> Result<(), TrainError> {
        let bytes = event.write_to_bytes().map_err(io::Error::other);
        let written = bytes.and_then(|bytes| self.writer.write(&bytes));
        written.map_err(|error| TrainError::io("write", &self.path, error))
    }
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

/// Creates a summary of one value.
fn single_value_summary(value: Summary_Value) -> Summary {
    let mut summary = Summary::new();
    summary.set_value(RepeatedField::from_vec(vec![value]));
    summary
}

/// Creates a summary for the plugin `plugin` of TensorBoard.
fn plugin_summary(plugin: &str, tag: &str, content: Vec<u8>, tensor: TensorProto) -> Summary {
    let mut data = SummaryMetadata_PluginData::new();
    data.set_plugin_name(plugin.into());
    data.set_content(content);
    let mut metadata = SummaryMetadata::new();
    metadata.set_plugin_data(data);
    let mut value = Summary_Value::new();
    value.set_tag(tag.into());
    value.set_metadata(metadata);
    value.set_tensor(tensor);
    single_value_summary(value)
}

/// Converts a value of a recipe: a number, a switch, or else text.
fn hparam(value: &toml::Value) -> HparamValue {
    let mut converted = HparamValue::new();
    match value {
        toml::Value::Integer(n) => converted.set_number_value(*n as f64),
        toml::Value::Float(x) => converted.set_number_value(*x),
        toml::Value::Boolean(on) => converted.set_bool_value(*on),
        toml::Value::String(text) => converted.set_string_value(text.clone()),
        other => converted.set_string_value(other.to_string()),
    }
    converted
}

/// Reads width and height in pixels from the header of a PNG file.
fn png_size(png: &[u8]) -> Option<[i32; 2]> {
    let header = png.strip_prefix(b"\x89PNG\r\n\x1a\n")?;
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
                events.push(Event::parse_from_bytes(&rest[12..12 + n_bytes]).unwrap());
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
        let values: Vec<&Summary_Value> = events
            .iter()
            .filter(|event| event.has_summary())
            .map(|event| &event.get_summary().value[0])
            .collect();
        assert_eq!((values[0].get_tag(), values[0].get_simple_value()), ("train/loss", 0.5));
        assert_eq!(values[1].get_tensor().string_val[0], b"    seed = 1");
        assert_eq!((values[2].get_image().width, values[2].get_image().height), (258, 7));
        let content = values[3].get_metadata().get_plugin_data().get_content();
        let data = HParamsPluginData::parse_from_bytes(content).unwrap();
        assert_eq!(data.get_session_start_info().hparams["optim.lr"].get_number_value(), 0.25);
    }
}
