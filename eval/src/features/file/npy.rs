//! NumPy's format.

use std::fs::File;
use std::io::{BufReader, BufWriter, Seek};
use std::path::Path;

use npyz::{DType, NpyFile, NpyHeader, Order, WriterBuilder};

use super::found::Found;
use crate::EvalError;
use crate::features::mapped::Mapped;
use crate::features::table::Table;

/// Writes the rows, `[n, width]`.
pub(super) fn write(path: &Path, table: &Table) -> Result<(), EvalError> {
    let written = || -> std::io::Result<()> {
        let out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        let shape = [table.len() as u64, table.columns.width() as u64];
        let mut writer = npyz::WriteOptions::new().default_dtype().shape(&shape).writer(out).begin_nd()?;
        writer.extend(table.rows().iter().copied())?;
        writer.finish()
    };
    written().map_err(|source| EvalError::io("write", path, source))
}

/// Reads an array `[n, width]` of f32, which is mapped, or of f64.
pub(super) fn read(path: &Path) -> Result<Found, EvalError> {
    let refused = |reason: String| EvalError::read(path, reason);
    let file = File::open(path).map_err(|source| EvalError::io("open", path, source))?;
    let mut reader = BufReader::new(file);
    let header = NpyHeader::from_reader(&mut reader).map_err(|error| refused(error.to_string()))?;
    let start = reader.stream_position().map_err(|source| EvalError::io("read", path, source))?;
    let array = NpyFile::with_header(header, reader);
    let [n, width] = *array.shape() else {
        return Err(refused(format!("its shape is {:?}, not [rows, columns]", array.shape())));
    };
    let n = n as usize;
    let width = width as usize;
    let n_numbers = n.checked_mul(width).ok_or_else(|| refused("its shape is too large".into()))?;
    let dtype = array.dtype();
    let name = match &dtype {
        DType::Plain(plain) => plain.to_string(),
        other => other.descr(),
    };
    if array.order() != Order::C {
        return Err(refused(
            "its columns are stored one after the other, not its rows (Fortran order)".into(),
        ));
    }
    match name.as_str() {
        "<f4" if !start.is_multiple_of(4) => {
            Ok(Found::Memory(width, array.into_vec().map_err(|error| refused(error.to_string()))?))
        }
        "<f4" => {
            let mapped = Mapped::open_from(path, start as usize, Some(n_numbers));
            Ok(Found::File(width, mapped.map_err(|error| refused(error.to_string()))?))
        }
        "<f8" => {
            let values: Vec<f64> = array.into_vec().map_err(|error| refused(error.to_string()))?;
            Ok(Found::Memory(width, values.into_iter().map(|value| value as f32).collect()))
        }
        other => Err(refused(format!("its numbers are {other}, not <f4 (float32) or <f8 (float64)"))),
    }
}
