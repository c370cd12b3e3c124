//! Formats of exported networks.

use std::path::Path;
use std::str::FromStr;

use crate::library::Library;
use crate::named::by_name;

/// Format of an exported network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One file with the names of timm or torchvision, and all metadata that this program needs to
    /// read it again.
    Safetensors,
    /// A folder for `timm.create_model("local-dir:…")`, or a file for `load_state_dict`.
    Timm,
    /// A file for `load_state_dict` of torchvision's networks.
    Torchvision,
    /// A folder for `AutoModel.from_pretrained` and `AutoImageProcessor.from_pretrained`.
    Transformers,
    /// A file for `load_state_dict` of DINOv2's networks.
    Dinov2,
    /// A file for `load_state_dict` of DINOv3's networks.
    Dinov3,
    /// A graph for ONNX runtimes.
    Onnx,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 7] = [
        Self::Safetensors,
        Self::Timm,
        Self::Torchvision,
        Self::Transformers,
        Self::Dinov2,
        Self::Dinov3,
        Self::Onnx,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::Timm => "timm",
            Self::Torchvision => "torchvision",
            Self::Transformers => "transformers",
            Self::Dinov2 => "dinov2",
            Self::Dinov3 => "dinov3",
            Self::Onnx => "onnx",
        }
    }

    /// Returns the library that reads the format; `None` for this program's own and for graphs.
    pub fn library(self) -> Option<Library> {
        match self {
            Self::Safetensors | Self::Onnx => None,
            Self::Timm => Some(Library::Timm),
            Self::Torchvision => Some(Library::Torchvision),
            Self::Transformers => Some(Library::Transformers),
            Self::Dinov2 => Some(Library::Dinov2),
            Self::Dinov3 => Some(Library::Dinov3),
        }
    }

    /// Returns the format for `path`: `requested`, if the path's extension agrees, or the one
    /// implied by the extension.
    ///
    /// # Errors
    /// A message, if the two contradict one another or neither determines a format.
    pub fn for_path(path: &Path, requested: Option<Self>) -> Result<Self, String> {
        let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
        let extension = extension.as_deref();
        let Some(format) = requested else {
            return match extension {
                Some("safetensors") => Ok(Self::Safetensors),
                Some("onnx") => Ok(Self::Onnx),
                Some("pth" | "pt") => Err(format!(
                    "{} may be for several libraries: add --format timm, torchvision, dinov2 or dinov3",
                    path.display()
                )),
                _ => Err(format!(
                    "{} does not end in .safetensors or .onnx: choose a format with --format {}",
                    path.display(),
                    Self::ALL.map(Self::name).join(", ")
                )),
            };
        };
        let (is_valid, requirement) = match format {
            Self::Safetensors => (extension == Some("safetensors"), "end in .safetensors"),
            Self::Onnx => (extension == Some("onnx"), "end in .onnx"),
            Self::Torchvision | Self::Dinov2 | Self::Dinov3 => {
                (matches!(extension, Some("safetensors" | "pth" | "pt")), "end in .safetensors or .pth")
            }
            Self::Timm => {
                let is_file = matches!(extension, Some("safetensors" | "pth" | "pt"));
                (is_file || !is_foreign(extension), "be a folder, or end in .safetensors or .pth")
            }
            Self::Transformers => (!is_foreign(extension), "be a folder"),
        };
        if is_valid {
            Ok(format)
        } else {
            Err(format!("--format {}: {} must {requirement}", format.name(), path.display()))
        }
    }

    /// Returns `true` if `path` is a folder in this format.
    pub(super) fn is_folder(self, path: &Path) -> bool {
        match self {
            Self::Transformers => true,
            Self::Timm => !is_foreign(path.extension().and_then(|extension| extension.to_str())),
            _ => false,
        }
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(&Self::ALL, Self::name, text)
    }
}

/// Returns `true` if `extension` is the extension of a file: `vits16.v2` is a folder.
fn is_foreign(extension: Option<&str>) -> bool {
    matches!(extension, Some("safetensors" | "pth" | "pt" | "bin" | "onnx" | "npy" | "parquet" | "json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format_for(path: &str, requested: Option<Format>) -> Result<Format, String> {
        Format::for_path(Path::new(path), requested)
    }

    #[test]
    fn extensions_imply_the_format_and_must_not_contradict_it() {
        assert_eq!(format_for("a.safetensors", None), Ok(Format::Safetensors));
        assert_eq!(format_for("a.onnx", None), Ok(Format::Onnx));
        assert_eq!(format_for("folder", Some(Format::Transformers)), Ok(Format::Transformers));
        assert_eq!(format_for("vits16.v2", Some(Format::Timm)), Ok(Format::Timm));
        assert_eq!(format_for("a.pth", Some(Format::Dinov2)), Ok(Format::Dinov2));
        for (path, requested) in [
            ("a.onnx", Some(Format::Safetensors)),
            ("a.safetensors", Some(Format::Onnx)),
            ("a.safetensors", Some(Format::Transformers)),
            ("a.pth", None),
            ("folder", None),
            ("classes.txt", None),
        ] {
            assert!(format_for(path, requested).is_err(), "{path} {requested:?}");
        }
    }
}
