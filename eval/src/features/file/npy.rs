//! NumPy's format.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use npyz::WriterBuilder;

use crate::EvalError;
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
