//! Reading of features with the images of their rows.

use std::path::Path;

use pipeline::magic::{FileKind, recognize_file};
use serde_json::Value;

use super::contents::{CHECKSUM, FileRows, ImageName, checksum};
use super::format::{Format, about_path, rows_path};
use super::{npy, parquet, safetensors};
use crate::EvalError;
use crate::features::columns::Columns;
use crate::features::table::Table;

/// Features that have been read from a file.
#[derive(Debug, Clone)]
pub struct FeatureFile {
    /// The rows, mapped where the format allows it.
    pub table: Table,
    /// The image of each row; `None` for a file of another program that does not name them.
    pub images: Option<Vec<ImageName>>,
    /// Description of how the features were computed, from the file or the one beside it; null if
    /// there is none.
    pub about: Value,
}

/// Reads the features in `path`, whose extension determines the format.
///
/// # Errors
/// [`EvalError::Io`] and [`EvalError::Read`].
pub fn read(path: &Path) -> Result<FeatureFile, EvalError> {
    let format = Format::from_path(path).map_err(|reason| EvalError::read(path, reason))?;
    check_beginning(path, format)?;
    let (rows, images, mut about) = match format {
        Format::Npy => (npy::read(path)?, read_image_names(&rows_path(path))?, read_about(&about_path(path))),
        Format::Parquet => {
            let (rows, images, about) = parquet::read(path)?;
            (rows, Some(images), about)
        }
        Format::Safetensors => {
            let (rows, about) = safetensors::read(path)?;
            (rows, read_image_names(&rows_path(path))?, about)
        }
    };
    let table = to_table(path, rows)?;
    if let Some(images) = images.as_ref().filter(|images| images.len() != table.len()) {
        let reason =
            format!("it has {} rows, but the list of images beside it has {}", table.len(), images.len());
        return Err(EvalError::read(path, reason));
    }
    // Files of other programs and of earlier versions have no checksum.
    if let Some(stated) = about.as_object_mut().and_then(|about| about.remove(CHECKSUM))
        && stated != checksum(table.rows(), table.columns.width(), images.as_deref().unwrap_or_default())
    {
        return Err(EvalError::read(
            path,
            "it or its list of images is damaged (the checksum is wrong); write it again",
        ));
    }
    Ok(FeatureFile { table, images, about })
}

/// Checks that the file at `path` does not begin like a file of another format than `format`.
fn check_beginning(path: &Path, format: Format) -> Result<(), EvalError> {
    let Some(found) = recognize_file(path) else { return Ok(()) };
    let expected = match format {
        Format::Npy => FileKind::Array,
        Format::Parquet => FileKind::Parquet,
        Format::Safetensors => FileKind::Weights,
    };
    if found.kind == expected {
        return Ok(());
    }
    Err(EvalError::read(path, format!("it is {}, not features as `ocelli embed` writes them", found.name)))
}

fn to_table(path: &Path, rows: FileRows) -> Result<Table, EvalError> {
    let (width, n_values) = match &rows {
        FileRows::Memory(width, values) => (*width, values.len()),
        FileRows::File(width, values) => (*width, values.values().len()),
    };
    if width == 0 || n_values == 0 {
        return Err(EvalError::read(path, "it has no rows"));
    }
    let columns = Columns { levels: vec![width], average: 0 };
    let n_rows = u32::try_from(n_values / width).map_err(|_| EvalError::read(path, "more than 2^32 rows"))?;
    let images = (0..n_rows).collect();
    Ok(match rows {
        FileRows::Memory(_, values) => Table::new(columns, images, values),
        FileRows::File(_, values) => Table::from_mapped(columns, images, values),
    })
}

/// Reads the list of images beside a file; `None` if there is none.
fn read_image_names(path: &Path) -> Result<Option<Vec<ImageName>>, EvalError> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(EvalError::io("read", path, source)),
    };
    let mut images: Vec<ImageName> = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let image = serde_json::from_str(line)
            .map_err(|error| EvalError::read(path, format!("line {}: {error}", i + 1)))?;
        images.push(image);
    }
    Ok(Some(images))
}

fn read_about(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or(Value::Null)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use augment::{DecodeRules, Transform};
    use serde_json::json;

    use super::*;
    use crate::images::ImageSet;
    use crate::images::source::{ImageFile, Source};

    fn images() -> ImageSet {
        let mut files = Vec::new();
        for i in 0..5usize {
            files.push(ImageFile {
                path: PathBuf::from("unused"),
                name: format!("a/{i}.png"),
                classes: if i == 1 { None } else { Some(vec![["cat", "dog"][i % 2].to_string()]) },
            });
        }
        let source = Source::Files(Arc::new(files));
        ImageSet::open(source, Transform::new(8), DecodeRules::default(), "set").unwrap()
    }

    /// Rows, names, classes and the description are read as they were written in every format.
    #[test]
    fn written_features_are_read_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let columns = Columns { levels: vec![3], average: 0 };
        // Image 2 has no row.
        let rows: Vec<f32> = (0..12).map(|i| i as f32 / 7.0).collect();
        let table = Table::new(columns, vec![0, 1, 3, 4], rows);
        for name in ["x.npy", "x.parquet", "x.safetensors"] {
            let path = folder.path().join(name);
            let about = json!({ "weights": "abc" });
            super::super::write::write(&path, Format::from_path(&path).unwrap(), &table, &images(), &about)
                .unwrap();
            let file = read(&path).unwrap();
            assert_eq!(file.table.rows(), table.rows(), "{name}");
            assert_eq!(file.table.columns.width(), 3);
            assert_eq!(file.about, about, "{name}");
            let images = file.images.unwrap();
            let keys: Vec<&str> = images.iter().map(|image| image.key.as_str()).collect();
            assert_eq!(keys, ["a/0.png", "a/1.png", "a/3.png", "a/4.png"], "{name}");
            let classes: Vec<Option<&str>> = images.iter().map(|image| image.class.as_deref()).collect();
            assert_eq!(classes, [Some("cat"), None, Some("dog"), Some("cat")], "{name}");
        }
    }

    /// Returns the reason for which the features in `path` are refused.
    fn reason(path: &Path) -> String {
        match read(path) {
            Err(EvalError::Read { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the reason for which a file of these bytes is refused.
    fn refusal(path: &Path, bytes: &[u8]) -> String {
        std::fs::write(path, bytes).unwrap();
        reason(path)
    }

    /// Returns a NumPy file of version 1.0.
    fn npy_file(header: &str, bytes: &[u8]) -> Vec<u8> {
        let header = format!("{header:<117}\n");
        [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), bytes].concat()
    }

    #[test]
    fn files_that_do_not_hold_features_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let text_path = folder.path().join("x.txt");
        assert!(refusal(&text_path, b"1 2").contains(".npy, .parquet or .safetensors"));
        for name in ["x.npy", "x.parquet", "x.safetensors"] {
            let path = folder.path().join(name);
            refusal(&path, b"");
            refusal(&path, b"PAR1 nothing of the kind PAR1");
        }
        let path = folder.path().join("x.npy");
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), }";
        assert!(refusal(&path, &npy_file(header, &[0; 47])).contains("12 numbers"));
        let flat = header.replace("(4, 3)", "(12,)");
        assert!(refusal(&path, &npy_file(&flat, &[0; 48])).contains("[12]"));
        let fortran = header.replace("False", "True");
        assert!(refusal(&path, &npy_file(&fortran, &[0; 48])).contains("Fortran"));
        let integers = header.replace("<f4", "<i4");
        assert!(refusal(&path, &npy_file(&integers, &[0; 48])).contains("float32"));
        // A list of other images beside the file.
        let path = folder.path().join("y.npy");
        std::fs::write(&path, npy_file(header, &[0; 48])).unwrap();
        assert_eq!(read(&path).unwrap().table.len(), 4);
        std::fs::write(rows_path(&path), "{\"key\": \"a\"}\n").unwrap();
        let other_list = reason(&path);
        assert!(other_list.contains("4 rows, but the list of images beside it has 1"), "{other_list}");
        std::fs::write(rows_path(&path), "{\"key\": 1}\n").unwrap();
        assert!(reason(&path).contains("line 1"));
    }
}
