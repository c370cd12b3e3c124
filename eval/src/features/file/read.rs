//! Reading of features, with the images that the rows are of.

use std::path::Path;

use serde_json::Value;

use super::format::{Format, about_of, rows_of};
use super::found::{CHECKSUM, Found, ImageName, checksum};
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
    /// How the features were computed, as the file or the one beside it says; null if nothing does.
    pub about: Value,
}

/// Reads the features in `path`, whose extension tells the format.
///
/// # Errors
/// [`EvalError::Io`] and [`EvalError::Read`].
pub fn read(path: &Path) -> Result<FeatureFile, EvalError> {
    let format = Format::of(path).map_err(|reason| EvalError::read(path, reason))?;
    let (found, images, mut about) = match format {
        Format::Npy => (npy::read(path)?, read_rows(&rows_of(path))?, read_about(&about_of(path))),
        Format::Parquet => {
            let (found, images, about) = parquet::read(path)?;
            (found, Some(images), about)
        }
        Format::Safetensors => {
            let (found, about) = safetensors::read(path)?;
            (found, read_rows(&rows_of(path))?, about)
        }
    };
    let table = table(path, found)?;
    if let Some(images) = images.as_ref().filter(|images| images.len() != table.len()) {
        let reason = format!("{} rows, and the list of images beside it has {}", table.len(), images.len());
        return Err(EvalError::read(path, reason));
    }
    // Files of other programs, and of older releases, state none.
    if let Some(stated) = about.as_object_mut().and_then(|about| about.remove(CHECKSUM))
        && stated != checksum(table.rows(), table.columns.width(), images.as_deref().unwrap_or_default())
    {
        return Err(EvalError::read(
            path,
            "it is damaged, or its list of images is: its checksum is another one; write it again",
        ));
    }
    Ok(FeatureFile { table, images, about })
}

fn table(path: &Path, found: Found) -> Result<Table, EvalError> {
    let (width, n_numbers) = match &found {
        Found::Memory(width, values) => (*width, values.len()),
        Found::File(width, values) => (*width, values.values().len()),
    };
    if width == 0 || n_numbers == 0 {
        return Err(EvalError::read(path, "it has no rows"));
    }
    let columns = Columns { levels: vec![width], average: 0 };
    let n_rows =
        u32::try_from(n_numbers / width).map_err(|_| EvalError::read(path, "more than 2^32 rows"))?;
    let images = (0..n_rows).collect();
    Ok(match found {
        Found::Memory(_, values) => Table::new(columns, images, values),
        Found::File(_, values) => Table::mapped(columns, images, values),
    })
}

/// Reads the list of images beside a file; `None` if there is none.
fn read_rows(path: &Path) -> Result<Option<Vec<ImageName>>, EvalError> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(EvalError::io("read", path, source)),
    };
    text.lines()
        .enumerate()
        .map(|(number, line)| {
            serde_json::from_str(line)
                .map_err(|error| EvalError::read(path, format!("line {}: {error}", number + 1)))
        })
        .collect::<Result<_, _>>()
        .map(Some)
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
        let file = |i: usize| ImageFile {
            path: PathBuf::from("unused"),
            name: format!("a/{i}.png"),
            class: (i != 1).then(|| ["cat", "dog"][i % 2].to_string()),
        };
        let source = Source::Files(Arc::new((0..5).map(file).collect()));
        ImageSet::open(source, Transform::new(8), DecodeRules::default(), "set").unwrap()
    }

    /// Every format gives back rows, names, classes and the description.
    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let columns = Columns { levels: vec![3], average: 0 };
        // Image 2 has no row.
        let rows: Vec<f32> = (0..12).map(|i| i as f32 / 7.0).collect();
        let table = Table::new(columns, vec![0, 1, 3, 4], rows);
        for name in ["x.npy", "x.parquet", "x.safetensors"] {
            let path = folder.path().join(name);
            let about = json!({ "weights": "abc" });
            super::super::write::write(&path, Format::of(&path).unwrap(), &table, &images(), &about).unwrap();
            let found = read(&path).unwrap();
            assert_eq!(found.table.rows(), table.rows(), "{name}");
            assert_eq!(found.table.columns.width(), 3);
            assert_eq!(found.about, about, "{name}");
            let images = found.images.unwrap();
            let keys: Vec<&str> = images.iter().map(|image| image.key.as_str()).collect();
            assert_eq!(keys, ["a/0.png", "a/1.png", "a/3.png", "a/4.png"], "{name}");
            let classes: Vec<Option<&str>> = images.iter().map(|image| image.class.as_deref()).collect();
            assert_eq!(classes, [Some("cat"), None, Some("dog"), Some("cat")], "{name}");
        }
    }

    #[test]
    fn files_that_are_no_features_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            read(&path).unwrap_err().to_string()
        };
        assert!(refused("x.txt", b"1 2").contains("must end in .npy, .parquet or .safetensors"));
        for name in ["x.npy", "x.parquet", "x.safetensors"] {
            assert!(refused(name, b"").contains("cannot be used as features"), "{name}");
            assert!(refused(name, b"PAR1 nothing of the kind PAR1").contains("cannot be used as"), "{name}");
        }
        let array = |header: &str, bytes: &[u8]| {
            let header = format!("{header:<117}\n");
            [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), bytes]
                .concat()
        };
        let text = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), }";
        assert!(refused("x.npy", &array(text, &[0; 47])).contains("12 numbers expected"));
        let flat = text.replace("(4, 3)", "(12,)");
        assert!(refused("x.npy", &array(&flat, &[0; 48])).contains("not [rows, columns]"));
        let columns = text.replace("False", "True");
        assert!(refused("x.npy", &array(&columns, &[0; 48])).contains("Fortran"));
        let whole = text.replace("<f4", "<i4");
        assert!(refused("x.npy", &array(&whole, &[0; 48])).contains("float32"));
        // A list of other rows beside it.
        let path = folder.path().join("y.npy");
        std::fs::write(&path, array(text, &[0; 48])).unwrap();
        assert_eq!(read(&path).unwrap().table.len(), 4);
        std::fs::write(rows_of(&path), "{\"key\": \"a\"}\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("4 rows, and the list of images beside it has 1"), "{error}");
        std::fs::write(rows_of(&path), "{\"key\": 1}\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("line 1"));
    }
}
