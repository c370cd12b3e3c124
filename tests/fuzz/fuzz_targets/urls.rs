//! Any text as a list of shards.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    // Ranges multiply: what is long is only slow.
    if text.len() > 200 || text.matches("..").count() > 1 {
        return;
    }
    if let Ok(urls) = pipeline::url::expand(&[text.to_string()]) {
        for url in urls.iter().take(100) {
            let _ = (url.to_string(), url.tar_name(), url.is_gzip(), url.is_list());
        }
    }
});
