//! Reads which file of src imports which, and looks for circles.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::{root, rust_files};

/// The path of a module below the crate, such as `memory::ring`. Each module is a file.
type Module = Vec<String>;

fn module(file: &Path) -> Module {
    let relative = file.strip_prefix(root().join("src")).unwrap().with_extension("");
    let mut path: Module =
        relative.components().map(|part| part.as_os_str().to_str().unwrap().to_owned()).collect();
    if path.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        path.pop();
    }
    path
}

/// The `use` declarations at the margin, without those of unit tests and of modules within a file.
fn declarations(text: &str) -> Vec<String> {
    let code = text.split("\n#[cfg(test)]").next().unwrap_or_default();
    let mut found = Vec::new();
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        if !line.starts_with("use ") {
            continue;
        }
        let mut declaration = line.trim_start_matches("use ").to_owned();
        while !declaration.contains(';') {
            declaration.push_str(lines.next().expect("a declaration ends").trim());
        }
        found.push(declaration.split(';').next().unwrap_or_default().to_owned());
    }
    found
}

/// Every path that a tree such as `a::{b, c::{d, e}}` names.
fn paths(tree: &str) -> Vec<String> {
    let Some((prefix, rest)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let inside = rest.trim_end().strip_suffix('}').expect("a tree closes its brace");
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, character) in inside.char_indices().chain([(inside.len(), ',')]) {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let branch = inside.get(start..at).unwrap_or_default().trim();
                found.extend(paths(branch).into_iter().filter(|path| !path.is_empty()));
                start = at + 1;
            }
            _ => {}
        }
    }
    found.into_iter().map(|path| format!("{}{path}", prefix.trim())).collect()
}

/// The module that holds what a path names, as seen from `from`; none if it is of another crate.
fn target(path: &str, from: &Module, modules: &BTreeSet<Module>) -> Option<Module> {
    let mut segments: Vec<String> =
        path.split("::").map(|segment| segment.split(" as ").next().unwrap_or_default().to_owned()).collect();
    let mut absolute = match segments[0].as_str() {
        "crate" => Vec::new(),
        "self" | "super" => from.clone(),
        first if modules.contains(&[from.as_slice(), &[first.to_owned()]].concat()) => from.clone(),
        _ => return None,
    };
    while ["crate", "self", "super"].contains(&segments.first()?.as_str()) {
        if segments.remove(0) == "super" {
            absolute.pop();
        }
    }
    absolute.extend(segments);
    while !modules.contains(&absolute) {
        absolute.pop()?;
    }
    Some(absolute)
}

/// For each file of src, the files that it imports from.
fn graph() -> BTreeMap<Module, BTreeSet<Module>> {
    let files = rust_files(&root().join("src"));
    let modules: BTreeSet<Module> = files.iter().map(|file| module(file)).collect();
    files
        .iter()
        .filter(|file| !file.ends_with("src/lib.rs"))
        .map(|file| {
            let (from, text) = (module(file), fs::read_to_string(file).unwrap());
            let imported: BTreeSet<Module> = declarations(&text)
                .iter()
                .flat_map(|declaration| paths(declaration))
                .filter_map(|path| target(&path, &from, &modules))
                .filter(|to| *to != from)
                .collect();
            (from, imported)
        })
        .collect()
}

/// The files on a way from `start` back to it, if there is one.
fn circle(graph: &BTreeMap<Module, BTreeSet<Module>>, start: &Module) -> Option<Vec<Module>> {
    let mut ways: Vec<Vec<Module>> = vec![vec![start.clone()]];
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop() {
        for next in graph.get(way.last()?).into_iter().flatten() {
            if next == start {
                return Some(way);
            }
            if seen.insert(next.clone()) {
                ways.push([way.as_slice(), std::slice::from_ref(next)].concat());
            }
        }
    }
    None
}

#[test]
fn no_file_imports_itself_through_others() {
    let graph = graph();
    let imports: usize = graph.values().map(BTreeSet::len).sum();
    assert!(imports > 300, "only {imports} imports were seen: the test is blind");
    for start in graph.keys() {
        if let Some(circle) = circle(&graph, start) {
            let names: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
            panic!("a circle of imports: {} -> {}", names.join(" -> "), start.join("::"));
        }
    }
}

#[test]
fn a_circle_is_found() {
    let module = |name: &str| vec![name.to_owned()];
    let graph = BTreeMap::from([
        (module("a"), BTreeSet::from([module("b")])),
        (module("b"), BTreeSet::from([module("c")])),
        (module("c"), BTreeSet::from([module("b")])),
    ]);
    assert_eq!(circle(&graph, &module("a")), None);
    assert_eq!(circle(&graph, &module("b")), Some(vec![module("b"), module("c")]));
    let modules = BTreeSet::from([module("a"), [module("a"), module("b")].concat()]);
    let from = [module("a"), module("b")].concat();
    assert_eq!(target("super::Item", &from, &modules), Some(module("a")));
    assert_eq!(target("crate::a::b::Item", &module("x"), &modules), Some(from));
    assert_eq!(target("std::fmt", &module("a"), &modules), None);
    assert_eq!(paths("a::{b, c::{d, e as f}}"), ["a::b", "a::c::d", "a::c::e as f"]);
}
