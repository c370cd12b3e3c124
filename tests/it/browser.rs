//! Pages in a browser, where one is installed.

use std::fs;
use std::process::Command;

/// Names that distributions give to the browser in which pages are opened.
const BROWSERS: [&str; 4] = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];

/// Returns the browser of this machine, if there is one.
pub(crate) fn browser() -> Option<&'static str> {
    BROWSERS.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
}

/// Checks what a browser makes of the page at `out`: more than `n_pictures` pictures and `n_lines`
/// lines of charts, no errors, no text that is none, and nothing wider than the window.
pub(crate) fn check_page(browser: &str, out: &str, n_pictures: usize, n_lines: usize) {
    // What the page itself says of its pictures and charts, at the end of its text.
    let page = fs::read_to_string(out).unwrap().replace(
        "</body>",
        "<script>addEventListener('load', () => setTimeout(() => { const all = [...document.images]; \
         document.body.append(`LOADED ${all.filter((i) => i.complete && i.naturalWidth > 0).length} OF ${all.length}, \
         ${document.querySelectorAll('.chart path').length} LINES, \
         ${(document.body.innerText.match(/\\[object|undefined|NaN/g) || []).length} SLIPS, \
         ${document.documentElement.scrollWidth - innerWidth} TOO WIDE`); }, 300));</script></body>",
    );
    fs::write(out, page).unwrap();
    for width in [400, 800, 1600] {
        let output = Command::new(browser)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--enable-logging=stderr",
                "--virtual-time-budget=3000",
            ])
            .args([&format!("--window-size={width},900"), "--dump-dom", &format!("file://{out}")])
            .output()
            .unwrap();
        let dom = String::from_utf8_lossy(&output.stdout);
        let log = String::from_utf8_lossy(&output.stderr);
        let errors: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
        assert!(errors.is_empty(), "{errors:#?}");
        let (_, said) = dom.rsplit_once("LOADED ").unwrap_or_else(|| panic!("the script did not run: {dom}"));
        let numbers: Vec<i64> = said
            .split(|c: char| !c.is_ascii_digit() && c != '-')
            .filter_map(|word| word.parse().ok())
            .collect();
        let [loaded, all, lines, slips, too_wide] = numbers[..5] else { panic!("{said}") };
        assert_eq!(loaded, all, "pictures at {width} px");
        assert!(all > n_pictures as i64 && lines >= n_lines as i64, "{said}");
        assert_eq!(slips, 0, "objects, undefined values and numbers that are none in the text: {dom}");
        assert!(too_wide <= 0, "{too_wide} px too wide at {width} px");
    }
}
