//! Links of the README and its pages.

use std::path::Path;

/// Pages to which the README and its pages link exist.
#[test]
fn links_lead_to_existing_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut pages = vec![root.join("README.md")];
    for entry in std::fs::read_dir(root.join("docs")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            pages.push(path);
        }
    }
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
            let file = link.split('#').next().unwrap();
            let is_external = link.starts_with("http") || file.is_empty();
            assert!(is_external || page.parent().unwrap().join(file).exists(), "{}: {link}", page.display());
        }
    }
}
