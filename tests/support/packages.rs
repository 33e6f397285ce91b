//! The programs of others that some tests need: where they are, and how they come onto a machine without them.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, Once};

use super::skipped::skip;

/// The packages of Debian and Ubuntu that hold them.
const PACKAGES: [&str; 2] = ["redis-server", "libfaketime"];

/// The Redis server: what `REDIS_SERVER` names, or the first on the path.
pub fn redis_server() -> PathBuf {
    find(|| {
        let named = env::var_os("REDIS_SERVER").map(PathBuf::from);
        named.or_else(|| {
            let path = env::var_os("PATH")?;
            env::split_paths(&path).map(|folder| folder.join("redis-server")).find(|program| program.is_file())
        })
    })
}

/// Chromium, where there is one: what `CHROMIUM` names, or the first on the path. It is large, and one test file needs
/// it: nobody has to install it.
pub fn chromium() -> Option<PathBuf> {
    let named = env::var_os("CHROMIUM").map(PathBuf::from);
    named.or_else(|| {
        let folders: Vec<PathBuf> = env::split_paths(&env::var_os("PATH")?).collect();
        let programs = ["chromium", "chromium-browser", "google-chrome"];
        let mut paths = programs.iter().flat_map(|program| folders.iter().map(move |folder| folder.join(program)));
        paths.find(|program| program.is_file())
    })
}

/// libfaketime for programs with threads, beside the C library of the same machine.
pub fn libfaketime() -> PathBuf {
    find(|| {
        let folders = fs::read_dir("/usr/lib").ok()?.filter_map(Result::ok);
        let mut libraries = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
        libraries.find(|library| library.is_file())
    })
}

/// A program of a package that a test can do without: none, and said so, where it is missing and cannot be installed.
pub fn optional(program: &str, package: &str) -> Option<PathBuf> {
    let look = || {
        let path = env::var_os("PATH")?;
        env::split_paths(&path).map(|folder| folder.join(program)).find(|program| program.is_file())
    };
    let found = look().or_else(|| {
        static INSTALLING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = INSTALLING.lock().expect("no holder panics");
        if look().is_none() && rustix::process::geteuid().is_root() {
            install(&[package]);
        }
        look()
    });
    if found.is_none() {
        skip(&format!("all that needs {program}: sudo apt-get install {package}"));
    }
    found
}

/// Looks; installs the packages if nothing is there, which only root may; and looks again.
fn find(look: impl Fn() -> Option<PathBuf>) -> PathBuf {
    static INSTALLED: Once = Once::new();
    if let Some(found) = look() {
        return found;
    }
    if rustix::process::geteuid().is_root() {
        INSTALLED.call_once(|| install(&PACKAGES));
    }
    look().unwrap_or_else(|| panic!("this test needs: sudo apt-get install {}", PACKAGES.join(" ")))
}

fn install(packages: &[&str]) {
    let install = [&["install", "-y", "--no-install-recommends"], packages].concat();
    let _ = apt_get(&install) || apt_get(&["update"]) && apt_get(&install);
}

/// Whether it succeeded. Runlevel 1 keeps the package from starting a service of its own.
fn apt_get(arguments: &[&str]) -> bool {
    let mut command = Command::new("apt-get");
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1").stdin(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
