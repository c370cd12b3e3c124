//! Directed graphs, as the targets of each node.

use std::collections::{BTreeMap, BTreeSet};

/// Returns the nodes of a cycle in a graph, if it has one.
pub(crate) fn circle(edges: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    let mut done = BTreeSet::new();
    for start in edges.keys() {
        let mut path = Vec::new();
        if let Some(cycle) = walk(start, edges, &mut done, &mut path) {
            return Some(cycle);
        }
    }
    None
}

/// Visits the nodes behind `node` depth-first; returns a cycle of which `path` is the beginning.
fn walk(
    node: &str,
    edges: &BTreeMap<String, BTreeSet<String>>,
    done: &mut BTreeSet<String>,
    path: &mut Vec<String>,
) -> Option<Vec<String>> {
    if let Some(start) = path.iter().position(|seen| seen == node) {
        return Some(path[start..].to_vec());
    }
    if done.contains(node) {
        return None;
    }
    path.push(node.to_string());
    for next in edges.get(node).into_iter().flatten() {
        if let Some(cycle) = walk(next, edges, done, path) {
            return Some(cycle);
        }
    }
    path.pop();
    done.insert(node.to_string());
    None
}

#[test]
fn cycles_are_found() {
    let ab_bc_ac = BTreeMap::from([
        ("a".to_string(), BTreeSet::from(["b".to_string(), "c".to_string()])),
        ("b".to_string(), BTreeSet::from(["c".to_string()])),
    ]);
    assert_eq!(circle(&ab_bc_ac), None);
    let ab_bc_cb = BTreeMap::from([
        ("a".to_string(), BTreeSet::from(["b".to_string()])),
        ("b".to_string(), BTreeSet::from(["c".to_string()])),
        ("c".to_string(), BTreeSet::from(["b".to_string()])),
    ]);
    assert_eq!(circle(&ab_bc_cb), Some(vec!["b".into(), "c".into()]));
}
