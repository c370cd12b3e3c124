//! Self-contained HTML pages: a template into which style, scripts and data are inserted.
//!
//! Everything that comes from a run, from weights or from a data set reaches a page as JSON, and
//! the scripts set it as text: no name of a file or class can become markup.

use serde_json::Value;

/// What a page has besides the parts of all pages.
#[derive(Default)]
pub(crate) struct Page<'a> {
    /// Title until the scripts set another one.
    pub(crate) title: &'a str,
    /// Rules of style.
    pub(crate) style: &'a str,
    /// Lines of HTML with controls, in the header.
    pub(crate) tools: &'a str,
    /// Scripts, in the order in which they run.
    pub(crate) scripts: &'a [&'a str],
}

impl Page<'_> {
    /// Renders the page with `data`.
    pub(crate) fn render(&self, data: &Value) -> String {
        let style = [include_str!("page/page.css"), self.style].concat();
        let mut scripts = include_str!("page/elements.js").to_string();
        for script in self.scripts {
            scripts.push('\n');
            scripts += script;
        }
        let page = include_str!("page.html")
            .replace("/*title*/", self.title)
            .replacen("/*style*/", &style, 1)
            .replacen("/*tools*/", self.tools, 1)
            .replacen("/*scripts*/", &scripts, 1);
        // Keeps end tags and comments from beginning within the data.
        let data = data.to_string().replace('<', "\\u003c");
        // Last, so that nothing in the data is taken for one of the other placeholders.
        page.replacen("/*data*/", &data, 1)
    }
}
