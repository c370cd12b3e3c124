//! Formats of pixels: the number of channels, and the type of a value.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Largest number of channels of an image.
pub const MAX_CHANNELS: usize = 1024;

/// Type of a channel's values, by its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Depth {
    /// Whole numbers in 0..=255.
    #[default]
    Eight,
    /// Whole numbers in 0..=65535.
    Sixteen,
    /// Floating-point numbers of 32 bits.
    Float,
}

/// Format of an image's pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PixelFormat {
    /// Number of channels.
    pub n_channels: usize,
    /// Type of the values.
    pub depth: Depth,
}

impl Depth {
    /// Returns the number of bits of a value.
    pub fn bits(self) -> u8 {
        match self {
            Self::Eight => 8,
            Self::Sixteen => 16,
            Self::Float => 32,
        }
    }

    /// Returns the number of bytes of a value.
    pub fn bytes(self) -> usize {
        usize::from(self.bits() / 8)
    }

    /// Returns the largest whole number; `None` for floating-point numbers.
    pub fn largest(self) -> Option<f32> {
        match self {
            Self::Eight => Some(255.0),
            Self::Sixteen => Some(65_535.0),
            Self::Float => None,
        }
    }

    /// Returns the value that corresponds to 1 in a network's constants: the largest whole number,
    /// or 1 for floating-point numbers.
    pub fn unit(self) -> f32 {
        self.largest().unwrap_or(1.0)
    }

    /// Returns whether this is the depth of photographs, [`Depth::Eight`].
    pub fn is_eight(&self) -> bool {
        *self == Self::Eight
    }
}

impl From<Depth> for u8 {
    fn from(depth: Depth) -> Self {
        depth.bits()
    }
}

impl TryFrom<u8> for Depth {
    type Error = String;

    fn try_from(bits: u8) -> Result<Self, String> {
        match bits {
            8 => Ok(Self::Eight),
            16 => Ok(Self::Sixteen),
            32 => Ok(Self::Float),
            _ => Err(format!("{bits} bits per channel: 8, 16 or 32 (floating point) are supported")),
        }
    }
}

impl JsonSchema for Depth {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Depth".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "format": "uint8", "minimum": 0 })
    }
}

impl Default for PixelFormat {
    fn default() -> Self {
        Self::RGB8
    }
}

impl PixelFormat {
    /// Three channels of 8 bits: photographs.
    pub const RGB8: Self = Self { n_channels: 3, depth: Depth::Eight };

    /// Returns whether pixels are 8-bit RGB, for which all operations equal Pillow's and
    /// torchvision's.
    pub fn is_rgb8(&self) -> bool {
        *self == Self::RGB8
    }

    /// Returns the number of bytes of a pixel in all channels.
    pub fn bytes_per_pixel(&self) -> usize {
        self.n_channels * self.depth.bytes()
    }

    /// Checks the number of channels.
    ///
    /// # Errors
    /// A message with the number.
    pub fn validate(&self) -> Result<(), String> {
        if (1..=MAX_CHANNELS).contains(&self.n_channels) {
            Ok(())
        } else {
            Err(format!("{} channels: 1 to {MAX_CHANNELS} are supported", self.n_channels))
        }
    }
}

/// Formats as `13 channels of 16 bits`.
impl std::fmt::Display for PixelFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let channels = if self.n_channels == 1 { "channel" } else { "channels" };
        let kind = if self.depth == Depth::Float { ", floating point" } else { "" };
        write!(f, "{} {channels} of {} bits{kind}", self.n_channels, self.depth.bits())
    }
}
