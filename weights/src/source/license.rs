//! The license that weights state, and the weights that they began with.

use networks::Origin;
use serde_json::Value;

use super::Source;
use crate::metadata::{LICENSE, ORIGINS};

/// Longest license that is shown, in characters: a name, not a text.
const LONGEST: usize = 100;

/// Value of `license` on Hugging Face for a license that `license_name` names.
const OTHER: &str = "other";

impl Source {
    /// Returns the license that the file, its configuration or the model card beside it states.
    pub(crate) fn license(&self) -> Option<String> {
        let in_file = self.metadata.get(LICENSE).map(String::as_str);
        let mut stated: Vec<&str> = Vec::new();
        // timm writes a license of its own into each configuration: where the model card states
        // another one, both are named.
        for license in [in_file, self.configured_license(), self.readme_license()].into_iter().flatten() {
            let line = license.lines().next().unwrap_or_default().trim();
            if !line.is_empty() && !stated.contains(&line) {
                stated.push(line);
            }
        }
        if stated.is_empty() {
            return None;
        }
        Some(stated.join(", ").chars().take(LONGEST).collect())
    }

    /// Returns the license in the configuration of timm or transformers.
    fn configured_license(&self) -> Option<&str> {
        let config = self.config.as_ref()?;
        let stated = [&config["license"], &config["pretrained_cfg"]["license"]];
        stated.into_iter().find_map(Value::as_str)
    }

    /// Returns the license in the first lines of the model card, as Hugging Face writes them.
    fn readme_license(&self) -> Option<&str> {
        let readme = self.readme.as_ref()?;
        let license = header_value(readme, "license")?;
        if license == OTHER { header_value(readme, "license_name").or(Some(license)) } else { Some(license) }
    }

    /// Returns the weights that those of a file of this program began with; none if the entry is
    /// damaged.
    pub(crate) fn origins(&self) -> Vec<Origin> {
        let stated = self.metadata.get(ORIGINS).and_then(|text| serde_json::from_str(text).ok());
        stated.unwrap_or_default()
    }
}

/// Returns the value of `key` in the header of a model card: lines `key: value` between two lines
/// `---`.
fn header_value<'a>(readme: &'a str, key: &str) -> Option<&'a str> {
    let mut lines = readme.lines();
    if lines.next()?.trim_end() != "---" {
        return None;
    }
    for line in lines {
        if line.trim_end() == "---" {
            return None;
        }
        if let Some((name, value)) = line.split_once(':')
            && name == key
        {
            return Some(value.trim().trim_matches(['"', '\'']));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licenses_are_read_from_the_header_of_a_model_card() {
        let readme =
            "---\ntags:\n- vision\nlicense: 'other'\nlicense_name: dinov3-license\n---\nlicense: mit\n";
        assert_eq!(header_value(readme, "license"), Some("other"));
        assert_eq!(header_value(readme, "license_name"), Some("dinov3-license"));
        assert_eq!(header_value(readme, "tag"), None);
        assert_eq!(header_value("license: mit\n", "license"), None, "it has no header");
        assert_eq!(header_value("---\ntags: a\n---\nlicense: mit\n", "license"), None, "after the header");
    }
}
