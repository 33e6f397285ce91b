//! Pictures of the page.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

use super::{DESKTOP, PHONE, page_of, replayed};
use crate::support::browser::{Browser, View};
use crate::support::sidecar::Sidecar;
use crate::support::watch::Watch;
use crate::support::{traffic, wait_for};

/// As wide as a README is read, so that the figures stay legible.
const README: View = View { width: 1_040, height: 900, dark: false };

/// Pictures of a ring full of life, as soon as it is.
fn take(browser: &mut Browser, sidecar: &Sidecar, shots: &[(PathBuf, View)]) {
    browser.open(&page_of(sidecar), shots[0].1);
    browser.wait_until(
        "!document.querySelector('.ticks .unknown') && document.body.dataset.state === 'live' && \
         [...document.querySelectorAll('.count')].every((count) => count.textContent !== '0')",
    );
    for (path, view) in shots {
        browser.look(*view);
        let picture = browser.screenshot(*view, path);
        assert_eq!(&picture[..8], b"\x89PNG\r\n\x1a\n");
        let [width, height] = [16, 20].map(|at| u32::from_be_bytes(picture[at..at + 4].try_into().unwrap()));
        assert!(width == view.width && height >= view.height, "{width} x {height}");
        // One colour alone would take a hundredth of that.
        assert!(picture.len() > 20_000, "{} is blank: {} bytes", path.display(), picture.len());
        println!("{}: {width} x {height}, {} bytes", path.display(), picture.len());
    }
}

#[test]
fn screenshots() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/page-screenshots");
    let shot = |name: &str, view: View| (folder.join(format!("{name}.png")), view);
    let shots = [
        shot("desktop-light", DESKTOP),
        shot("desktop-dark", View { dark: true, ..DESKTOP }),
        shot("phone-light", PHONE),
        shot("phone-dark", View { dark: true, ..PHONE }),
    ];
    let sidecar = Sidecar::start(&["--tick", "200ms"]);
    // Its liveliest part comes first, and lasts until the strip of sixty ticks is full.
    let _replay = replayed(&sidecar, 40);
    wait_for("sixty ticks", || (sidecar.status().rings[0].recent.len() == 60).then_some(()));
    take(&mut browser, &sidecar, &shots);
}

/// How long the traffic for the picture lasts: until the strip of sixty ticks is full, with a margin.
const PICTURED: Duration = Duration::from_secs(110);

#[test]
#[ignore = "makes the pictures in docs, in the two minutes that a strip of usual ticks takes to be full"]
fn of_the_docs() {
    let mut browser = Browser::start().expect("a picture needs a browser");
    let sidecar = Sidecar::start(&["--name", "logic-node-17"]);
    let _subscribers = [Watch::start(&sidecar, &[]), Watch::start(&sidecar, &["--group", "default"])];
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let shots =
        [(docs.join("page-light.png"), README), (docs.join("page-dark.png"), View { dark: true, ..README })];
    thread::scope(|scope| {
        scope.spawn(|| traffic::run(sidecar.listen, 1, PICTURED));
        let begun = Instant::now();
        while sidecar.status().rings[0].recent.first().is_none_or(|oldest| oldest.timed_out == 0) {
            assert!(begun.elapsed() < PICTURED, "the strip is not full");
            thread::sleep(Duration::from_millis(200));
        }
        take(&mut browser, &sidecar, &shots);
    });
    for (path, _) in shots {
        assert!(fs::metadata(path).unwrap().len() < 150_000, "the picture is too large for a README");
    }
}
