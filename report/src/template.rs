//! Self-contained HTML pages: templates into which style, scripts and data are inserted.
//!
//! Everything that comes from a run, from weights or from a data set reaches a page as JSON, and
//! the scripts set it as text: no name of a file or class can become markup.

use serde_json::Value;

/// Fills `template` with the style and the elements of all pages, with `scripts` in place of their
/// placeholders, and with `data`.
pub(crate) fn fill(template: &str, scripts: &[(&str, &str)], data: &Value) -> String {
    let mut page = template.replacen("/*style*/", include_str!("page/page.css"), 1);
    page = page.replacen("/*elements*/", include_str!("page/elements.js"), 1);
    for (placeholder, text) in scripts {
        page = page.replacen(placeholder, text, 1);
    }
    // Keeps end tags and comments from beginning within the data.
    let data = data.to_string().replace('<', "\\u003c");
    // Last, so that nothing in the data is taken for one of the other placeholders.
    page.replacen("/*data*/", &data, 1)
}
