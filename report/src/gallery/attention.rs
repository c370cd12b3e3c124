//! Attention of the class token in the last block, head by head (Caron et al. 2021, figure 1).

use eval::{ImageSet, class_attention};
use networks::Network;

use super::sheet::{Sheet, caption};
use super::tile::Tile;
use crate::ReportError;

/// Largest number of heads that are shown.
const MAX_HEADS: usize = 12;

/// Shows each image beside the mean of all heads and beside each head; empty for a backbone without
/// class token. The colors of a map range from its own lowest weight to its highest.
pub(super) fn sheet(network: &Network, images: &ImageSet) -> Result<Sheet, ReportError> {
    let size_px = images.transform.size_px as usize;
    let mut sheet = Sheet::default();
    for image in 0..images.len() {
        let (Some(view), Some(planes)) = (images.image(image)?, images.picture(image)?) else { continue };
        let Some(attention) = class_attention(network, &[&view], size_px) else { return Ok(sheet) };
        let n_shown = attention.heads.len().min(MAX_HEADS);
        let n = attention.grid[0] * attention.grid[1];
        let mean: Vec<f32> = (0..n)
            .map(|i| attention.heads.iter().map(|head| head[i]).sum::<f32>() / attention.heads.len() as f32)
            .collect();
        let caption = caption(images, image);
        let mut row = vec![Tile::from_planes(&planes, size_px, caption.clone())?];
        let mean_caption = format!("{caption}: mean of all heads");
        row.push(Tile::from_grid(&heat_map(&mean), attention.grid, mean_caption)?);
        for (index, head) in attention.heads.iter().take(n_shown).enumerate() {
            let head_caption = format!("{caption}: head {}", index + 1);
            row.push(Tile::from_grid(&heat_map(head), attention.grid, head_caption)?);
        }
        sheet.rows.push(row);
        let heads = (1..=n_shown).map(|number| format!("head {number}"));
        sheet.headings = ["image".into(), "mean".into()].into_iter().chain(heads).collect();
    }
    Ok(sheet)
}

/// Colors weights from the lowest, black, through red and yellow to the highest, white.
fn heat_map(weights: &[f32]) -> Vec<[u8; 3]> {
    let (low, high) = weights.iter().fold((f32::MAX, f32::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
    weights
        .iter()
        .map(|weight| {
            let share = if high > low { (weight - low) / (high - low) } else { 0.0 };
            // Each third of the range lights up one more channel.
            [0.0, 1.0, 2.0].map(|channel| (255.0 * (3.0 * share - channel).clamp(0.0, 1.0)).round() as u8)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_map_ranges_from_black_to_white() {
        assert_eq!(heat_map(&[0.1, 0.4, 0.25, 0.2]), [[0; 3], [255; 3], [255, 128, 0], [255, 0, 0]]);
        assert_eq!(heat_map(&[0.5, 0.5]), [[0; 3]; 2]);
    }
}
