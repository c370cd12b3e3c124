//! NumPy's format.

use std::fs::File;
use std::io::{BufReader, BufWriter, Seek};
use std::path::Path;

use npyz::{DType, NpyFile, NpyHeader, Order, WriterBuilder};

use super::contents::FileRows;
use crate::EvalError;
use crate::features::mapped::Mapped;
use crate::features::table::Table;

/// Writes the rows, `[n, width]`.
pub(super) fn write(path: &Path, table: &Table) -> Result<(), EvalError> {
    write_array(path, table).map_err(|source| EvalError::io("write", path, source))
}

fn write_array(path: &Path, table: &Table) -> std::io::Result<()> {
    let out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let shape = [table.len() as u64, table.columns.width() as u64];
    let mut writer = npyz::WriteOptions::new().default_dtype().shape(&shape).writer(out).begin_nd()?;
    writer.extend(table.rows().iter().copied())?;
    writer.finish()
}

/// Reads an array `[n, width]` of f32, which is mapped, or of f64.
pub(super) fn read(path: &Path) -> Result<FileRows, EvalError> {
    let file = File::open(path).map_err(|source| EvalError::io("open", path, source))?;
    let mut reader = BufReader::new(file);
    let header = NpyHeader::from_reader(&mut reader).map_err(|error| EvalError::read(path, error))?;
    let start = reader.stream_position().map_err(|source| EvalError::io("read", path, source))?;
    let array = NpyFile::with_header(header, reader);
    let [n, width] = *array.shape() else {
        let reason = format!("its shape is {:?}, not [rows, columns]", array.shape());
        return Err(EvalError::read(path, reason));
    };
    let n = n as usize;
    let width = width as usize;
    let n_values = n.checked_mul(width).ok_or_else(|| EvalError::read(path, "its shape is too large"))?;
    let dtype = array.dtype();
    let name = match &dtype {
        DType::Plain(plain) => plain.to_string(),
        other => other.descr(),
    };
    if array.order() != Order::C {
        return Err(EvalError::read(
            path,
            "its columns are stored one after the other, not its rows (Fortran order)",
        ));
    }
    match name.as_str() {
        "<f4" if !start.is_multiple_of(4) => {
            let values: Vec<f32> = array.into_vec().map_err(|error| EvalError::read(path, error))?;
            Ok(FileRows::Memory(width, values))
        }
        "<f4" => {
            let mapped = Mapped::open_from(path, start as usize, Some(n_values))
                .map_err(|error| EvalError::read(path, error))?;
            Ok(FileRows::File(width, mapped))
        }
        "<f8" => {
            let values: Vec<f64> = array.into_vec().map_err(|error| EvalError::read(path, error))?;
            Ok(FileRows::Memory(width, values.into_iter().map(|value| value as f32).collect()))
        }
        other => {
            let reason = format!("its numbers are {other}, not <f4 (float32) or <f8 (float64)");
            Err(EvalError::read(path, reason))
        }
    }
}
