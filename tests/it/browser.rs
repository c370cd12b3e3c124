//! Pages in a browser, if one is installed.

use std::fs;
use std::process::Command;

/// Names of the browser in distributions.
const BROWSERS: [&str; 4] = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];

/// Returns the browser of this machine, if there is one.
pub(crate) fn browser() -> Option<&'static str> {
    BROWSERS.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
}

/// Returns the titles of the charts of the page at `out`, as `browser` shows them.
pub(crate) fn chart_titles(browser: &str, out: &str) -> Vec<String> {
    let flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"];
    let output = Command::new(browser).args(flags).arg(format!("file://{out}")).output().unwrap();
    let dom = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut titles = Vec::new();
    for rest in dom.split("<h4>").skip(1) {
        titles.push(rest.split('<').next().unwrap().to_string());
    }
    titles
}

/// Checks the page at `out` in a browser: more than `n_pictures` pictures, at least `n_lines` lines
/// in charts, no errors, no text such as `undefined`, and nothing wider than the window.
pub(crate) fn check_page(browser: &str, out: &str, n_pictures: usize, n_lines: usize) {
    // A script that counts pictures, lines and bad text, and appends the counts to the text.
    let page = fs::read_to_string(out).unwrap().replace(
        "</body>",
        "<script>addEventListener('load', () => setTimeout(() => { const all = [...document.images]; \
         document.body.append(`LOADED ${all.filter((i) => i.complete && i.naturalWidth > 0).length} OF \
         ${all.length}, ${document.querySelectorAll('.chart path').length} LINES, \
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
        let (_, counts) =
            dom.rsplit_once("LOADED ").unwrap_or_else(|| panic!("the script did not run: {dom}"));
        let numbers: Vec<i64> = counts
            .split(|c: char| !c.is_ascii_digit() && c != '-')
            .filter_map(|word| word.parse().ok())
            .collect();
        let [loaded, all, lines, slips, too_wide] = numbers[..5] else { panic!("{counts}") };
        assert_eq!(loaded, all, "pictures at {width} px");
        assert!(all > n_pictures as i64 && lines >= n_lines as i64, "{counts}");
        assert_eq!(slips, 0, "objects, undefined values or NaN in the text: {dom}");
        assert!(too_wide <= 0, "{too_wide} px too wide at {width} px");
    }
}
