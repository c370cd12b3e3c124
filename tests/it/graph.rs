//! Directed graphs, as the targets of each node.

use std::collections::{BTreeMap, BTreeSet};

/// Finds a cycle in a graph, if there is one.
pub(crate) fn circle(edges: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    let mut done = BTreeSet::new();
    for start in edges.keys() {
        let mut path = Vec::new();
        if let Some(found) = walk(start, edges, &mut done, &mut path) {
            return Some(found);
        }
    }
    None
}

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
        if let Some(found) = walk(next, edges, done, path) {
            return Some(found);
        }
    }
    path.pop();
    done.insert(node.to_string());
    None
}

#[test]
fn circles_are_found() {
    let graph = |edges: &[(&str, &str)]| {
        let mut graph = BTreeMap::<String, BTreeSet<String>>::new();
        edges.iter().for_each(|(a, b)| {
            graph.entry((*a).into()).or_default().insert((*b).into());
        });
        graph
    };
    assert_eq!(circle(&graph(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    assert_eq!(circle(&graph(&[("a", "b"), ("b", "c"), ("c", "b")])), Some(vec!["b".into(), "c".into()]));
}
