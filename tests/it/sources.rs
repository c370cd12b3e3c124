//! Parsed source files of a crate: uses between files, definitions, and lengths.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// Crates of this workspace.
const MEMBERS: [&str; 13] = [
    "pipeline", "augment", "prep", "kernels", "ranks", "networks", "trainer", "eval", "curate", "weights",
    "session", "report", "scripts",
];

/// Conditions of code that is compiled only for tests.
const FOR_TESTS: [&str; 2] = ["test", "feature = \"testing\""];

/// A crate.
pub(crate) struct Crate {
    pub(crate) name: String,
    /// Source files, sorted by path.
    pub(crate) files: Vec<File>,
}

/// A source file without its tests.
pub(crate) struct File {
    /// Path below the folder of sources.
    pub(crate) path: String,
    /// Text without the test module, which comes last.
    pub(crate) text: String,
    /// Path of its module: `ranks::mesh`.
    module: String,
    /// Paths, from the crate on, of everything that the file names.
    pub(crate) paths: BTreeSet<String>,
    /// Names that it re-exports: each name, and the path that it stands for.
    exports: BTreeMap<String, String>,
    /// Modules that it re-exports completely: `pub use a::b::*`.
    open_exports: Vec<String>,
    definitions: BTreeSet<String>,
    /// Words of its names and string literals, in lower case; comments are left out.
    pub(crate) words: BTreeSet<String>,
    public_modules: Vec<String>,
}

impl Crate {
    /// Parses all files below `folder`.
    pub(crate) fn read(name: &str, folder: &Path) -> Self {
        let mut files = Vec::new();
        let mut folders = vec![folder.to_path_buf()];
        while let Some(next) = folders.pop() {
            for entry in std::fs::read_dir(next).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let below = path.strip_prefix(folder).unwrap().to_str().unwrap().to_string();
                    files.push(File::parse(name, below, &std::fs::read_to_string(&path).unwrap()));
                }
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Self { name: name.to_string(), files }
    }

    /// Returns for each file the files whose definitions it names, also through re-exports.
    pub(crate) fn uses_between_files(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut edges = BTreeMap::<String, BTreeSet<String>>::new();
        for file in &self.files {
            let mut targets = BTreeSet::new();
            for target in file.paths.iter().filter_map(|path| self.file_defining(path)) {
                if target != file.path {
                    targets.insert(target.to_string());
                }
            }
            edges.insert(file.path.clone(), targets);
        }
        edges
    }

    /// Iterates over the paths of its public modules.
    pub(crate) fn public_modules(&self) -> impl Iterator<Item = &String> {
        self.files.iter().flat_map(|file| &file.public_modules)
    }

    /// Returns the file that defines the item at `path`, if it belongs to this crate.
    fn file_defining(&self, path: &str) -> Option<&str> {
        let mut path = path.to_string();
        // Names are re-exported a few times at most.
        for _ in 0..8 {
            let (file, rest) = self.longest_module(&path)?;
            let first = rest.split("::").next().unwrap_or_default();
            if first.is_empty() || file.definitions.contains(first) {
                return Some(&file.path);
            }
            match file.exports.get(first) {
                Some(target) => path = format!("{target}{}", &rest[first.len()..]),
                None => {
                    let mut open_exports = file.open_exports.iter();
                    match open_exports.find(|module| self.defines(module, first)) {
                        Some(module) => path = format!("{module}::{rest}"),
                        None => return Some(&file.path),
                    }
                }
            }
        }
        None
    }

    /// Returns `true` if the file of `module` defines `name`.
    fn defines(&self, module: &str, name: &str) -> bool {
        let mut files = self.files.iter();
        files.find(|file| file.module == module).is_some_and(|file| file.definitions.contains(name))
    }

    /// Returns the file of the longest prefix of `path` that is a module, and the rest of the path.
    fn longest_module<'a>(&self, path: &'a str) -> Option<(&File, &'a str)> {
        let mut end = path.len();
        loop {
            if let Some(file) = self.files.iter().find(|file| file.module == path[..end]) {
                return Some((file, path[end..].trim_start_matches("::")));
            }
            end = path[..end].rfind("::")?;
        }
    }
}

impl File {
    fn parse(krate: &str, path: String, text: &str) -> Self {
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_string();
        let mut parts: Vec<&str> = path.trim_end_matches(".rs").split('/').collect();
        if matches!(parts.last(), Some(&("mod" | "lib" | "main"))) {
            parts.pop();
        }
        parts.insert(0, krate);
        let module = parts.join("::");
        let mut file = Self {
            module: module.clone(),
            paths: BTreeSet::new(),
            exports: BTreeMap::new(),
            open_exports: Vec::new(),
            definitions: BTreeSet::new(),
            words: BTreeSet::new(),
            public_modules: Vec::new(),
            path,
            text,
        };
        let parsed = syn::parse_file(&file.text).unwrap_or_else(|error| panic!("{}: {error}", file.path));
        Reader { krate, module: vec![module], file: &mut file }.visit_file(&parsed);
        collect_words(file.text.parse().unwrap(), &mut file.words);
        file
    }
}

/// Adds the words of names and literals to `words`: those of `DinoLoss` and `"dino_loss"` are
/// `dino` and `loss`.
fn collect_words(tokens: TokenStream, words: &mut BTreeSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => {
                let is_doc =
                    matches!(group.stream().into_iter().next(), Some(TokenTree::Ident(i)) if i == "doc");
                if group.delimiter() != Delimiter::Bracket || !is_doc {
                    collect_words(group.stream(), words);
                }
            }
            TokenTree::Ident(ident) => split_words(&ident.to_string(), words),
            TokenTree::Literal(literal) => {
                if let syn::Lit::Str(text) = syn::Lit::new(literal) {
                    split_words(&text.value(), words);
                }
            }
            TokenTree::Punct(_) => {}
        }
    }
}

/// Adds the words of a name or a text to `words`.
fn split_words(text: &str, words: &mut BTreeSet<String>) {
    let mut word = String::new();
    let mut last = ' ';
    for c in text.chars().chain([' ']) {
        if !c.is_alphanumeric() || (c.is_uppercase() && last.is_lowercase()) {
            words.insert(std::mem::take(&mut word));
        }
        if c.is_alphanumeric() {
            word.extend(c.to_lowercase());
        }
        last = c;
    }
    // Names of mixed case are also one word: `ViT`.
    words.extend(text.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase));
}

/// Visitor of the syntax of a file.
struct Reader<'a> {
    krate: &'a str,
    /// Module of the file, and the inline modules that enclose the current position.
    module: Vec<String>,
    file: &'a mut File,
}

impl Reader<'_> {
    /// Path of the current module.
    fn current_module(&self) -> String {
        self.module.join("::")
    }

    /// Resolves a path to one from the crate on; `None` for items outside of this workspace.
    fn absolute(&self, parts: &[String]) -> Option<String> {
        let module = self.current_module();
        let mut base: Vec<&str> = module.split("::").collect();
        let mut rest = parts;
        match parts.first()?.as_str() {
            "crate" => {
                base = vec![self.krate];
                rest = &parts[1..];
            }
            "self" => rest = &parts[1..],
            "super" => {
                while rest.first().is_some_and(|part| part == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            first if MEMBERS.contains(&first) => base = Vec::new(),
            // A module that is declared in this one.
            first if self.file.public_modules.contains(&format!("{module}::{first}")) => {}
            first if self.file.exports.contains_key(&format!("mod {first}")) => {}
            _ => return None,
        }
        let mut all: Vec<&str> = base;
        all.extend(rest.iter().map(String::as_str));
        Some(all.join("::"))
    }

    /// Records the items of a `use` tree whose enclosing path is `before`.
    fn add_use_tree(&mut self, tree: &syn::UseTree, before: &mut Vec<String>, exported: bool) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.add_use_tree(&path.tree, before, exported);
                before.pop();
            }
            syn::UseTree::Group(group) => {
                for item in &group.items {
                    self.add_use_tree(item, before, exported);
                }
            }
            syn::UseTree::Name(name) => {
                let name = name.ident.to_string();
                self.add_use(before, &name, &name, exported);
            }
            syn::UseTree::Rename(rename) => {
                self.add_use(before, &rename.ident.to_string(), &rename.rename.to_string(), exported);
            }
            syn::UseTree::Glob(_) => {
                let Some(path) = self.absolute(before) else { return };
                if exported {
                    self.file.open_exports.push(path)
                } else {
                    self.file.paths.insert(path);
                }
            }
        }
    }

    /// Records one item of a `use` tree.
    fn add_use(&mut self, before: &[String], name: &str, alias: &str, exported: bool) {
        let mut parts = before.to_vec();
        if name != "self" {
            parts.push(name.to_string());
        }
        let Some(path) = self.absolute(&parts) else { return };
        if exported {
            self.file.exports.insert(alias.to_string(), path);
        } else {
            self.file.paths.insert(path);
        }
    }

    /// Returns `true` for items that are compiled only for tests.
    fn is_test(attributes: &[syn::Attribute]) -> bool {
        attributes.iter().any(|attribute| {
            let syn::Meta::List(list) = &attribute.meta else { return false };
            list.path.is_ident("cfg") && FOR_TESTS.contains(&list.tokens.to_string().as_str())
        })
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let exported = !matches!(item.vis, syn::Visibility::Inherited);
        self.add_use_tree(&item.tree, &mut Vec::new(), exported);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if Self::is_test(&item.attrs) {
            return;
        }
        let path = format!("{}::{}", self.current_module(), item.ident);
        match item.content {
            None if matches!(item.vis, syn::Visibility::Public(_)) => self.file.public_modules.push(path),
            None => {
                self.file.exports.insert(format!("mod {}", item.ident), path);
            }
            Some(_) => {
                self.module.push(item.ident.to_string());
                visit::visit_item_mod(self, item);
                self.module.pop();
            }
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if parts.len() > 1
            && let Some(path) = self.absolute(&parts)
        {
            self.file.paths.insert(path);
        }
        visit::visit_path(self, path);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if Self::is_test(&item.attrs) {
            return;
        }
        self.file.definitions.insert(item.sig.ident.to_string());
        visit::visit_item_fn(self, item);
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        let name = match item {
            syn::Item::Struct(item) => Some(&item.ident),
            syn::Item::Enum(item) => Some(&item.ident),
            syn::Item::Trait(item) => Some(&item.ident),
            syn::Item::Type(item) => Some(&item.ident),
            syn::Item::Const(item) => Some(&item.ident),
            syn::Item::Static(item) => Some(&item.ident),
            _ => None,
        };
        if let Some(name) = name {
            self.file.definitions.insert(name.to_string());
        }
        visit::visit_item(self, item);
    }
}
