//! Messages of TensorBoard's `event.proto`, `summary.proto`, `tensor.proto` and `plugin_data.proto`,
//! with the fields that Ocelli writes.

use std::collections::BTreeMap;

/// `Event`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Event {
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(super) file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub(super) summary: Option<Summary>,
}

/// `Summary`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<SummaryValue>,
}

/// `Summary.Value`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SummaryValue {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
    #[prost(message, optional, tag = "4")]
    pub(super) image: Option<SummaryImage>,
    #[prost(message, optional, tag = "8")]
    pub(super) tensor: Option<Tensor>,
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<SummaryMetadata>,
}

/// `Summary.Image`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SummaryImage {
    #[prost(int32, tag = "1")]
    pub(super) height: i32,
    #[prost(int32, tag = "2")]
    pub(super) width: i32,
    #[prost(int32, tag = "3")]
    pub(super) colorspace: i32,
    #[prost(bytes = "vec", tag = "4")]
    pub(super) encoded_image_string: Vec<u8>,
}

/// `SummaryMetadata`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    pub(super) plugin_data: Option<PluginData>,
    #[prost(string, tag = "3")]
    pub(super) summary_description: String,
    #[prost(enumeration = "DataClass", tag = "4")]
    pub(super) data_class: i32,
}

/// `DataClass`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(super) enum DataClass {
    Unknown = 0,
    Scalar = 1,
}

/// `SummaryMetadata.PluginData`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub(super) plugin_name: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) content: Vec<u8>,
}

/// `TensorProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Tensor {
    #[prost(enumeration = "TensorType", tag = "1")]
    pub(super) dtype: i32,
    #[prost(float, repeated, tag = "5")]
    pub(super) float_val: Vec<f32>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub(super) string_val: Vec<Vec<u8>>,
}

/// `DataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(super) enum TensorType {
    Invalid = 0,
    Float = 1,
    String = 7,
}

/// `HParamsPluginData`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct HparamsData {
    #[prost(message, optional, tag = "3")]
    pub(super) session_start_info: Option<Session>,
}

/// `SessionStartInfo`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Session {
    #[prost(btree_map = "string, message", tag = "1")]
    pub(super) hparams: BTreeMap<String, HparamValue>,
    #[prost(double, tag = "5")]
    pub(super) start_time_secs: f64,
}

/// `google.protobuf.Value`, of which one field is set.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct HparamValue {
    #[prost(double, optional, tag = "2")]
    pub(super) number_value: Option<f64>,
    #[prost(string, optional, tag = "3")]
    pub(super) string_value: Option<String>,
    #[prost(bool, optional, tag = "4")]
    pub(super) bool_value: Option<bool>,
}
