//! The commands of the README, run unchanged.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use image::{ImageBuffer, Rgb};

/// Script in place of ocelli that adds flags with which the README's runs take seconds.
const SHIM: &str = r#"#!/bin/sh
case "$1" in
pretrain)
    exec "$PROGRAM" "$@" --set optim.batch_size=4 --set optim.length.steps=2 --set optim.warmup.steps=1 \
        --set model.width=32 --set model.depth=1 --set model.heads=2 --set method.head_hidden=[16] ;;
*) exec "$PROGRAM" "$@" ;;
esac
"#;

/// Returns the shell blocks of the README below `heading`.
fn blocks(heading: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = std::fs::read_to_string(root.join("README.md")).unwrap();
    let section = text.split(&format!("\n## {heading}\n")).nth(1).unwrap().split("\n## ").next().unwrap();
    let blocks = section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap().to_string());
    blocks.collect()
}

#[test]
fn the_lines_about_ones_own_images_work() {
    let folder = tempfile::tempdir().unwrap();
    let shim = folder.path().join("bin/ocelli");
    std::fs::create_dir_all(shim.parent().unwrap()).unwrap();
    std::fs::write(&shim, SHIM).unwrap();
    std::fs::set_permissions(&shim, std::fs::Permissions::from_mode(0o755)).unwrap();
    for i in 0..24u32 {
        let path = folder.path().join(format!("photos/{}/{i}.png", ["cat", "dog"][i as usize % 2]));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let image =
            ImageBuffer::from_fn(60, 50, |x, y| Rgb([(x * i) as u8, (y * (i + 3)) as u8, (i * 9) as u8]));
        image.save(path).unwrap();
    }
    let path = format!("{}:{}", shim.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let blocks = blocks("Your own images");
    assert!(blocks.len() >= 2, "{} blocks", blocks.len());
    for block in blocks {
        let output = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &block])
            .current_dir(folder.path())
            .env("PATH", &path)
            .env("PROGRAM", env!("CARGO_BIN_EXE_ocelli-under-test"))
            .env("OCELLI_CACHE", folder.path().join("cache"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{block}\n{said}");
    }
    for made in
        ["runs/mine/report.html", "backbone/config.json", "features.npy", "runs/mine/evaluations.jsonl"]
    {
        assert!(folder.path().join(made).exists(), "{made}");
    }
}

/// Pages to which the README and its pages link exist.
#[test]
fn links_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut pages = vec![root.join("README.md")];
    pages.extend(std::fs::read_dir(root.join("scripts/pages")).unwrap().map(|page| page.unwrap().path()));
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
            let file = link.split('#').next().unwrap();
            let is_elsewhere = link.starts_with("http") || file.is_empty();
            assert!(is_elsewhere || page.parent().unwrap().join(file).exists(), "{}: {link}", page.display());
        }
    }
}
