//! Pictures within a page.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Returns the file of a picture of the format `kind`, `png` or `jpeg`, as a `data:` URL.
pub(crate) fn data_url(kind: &str, bytes: &[u8]) -> String {
    format!("data:image/{kind};base64,{}", STANDARD.encode(bytes))
}
