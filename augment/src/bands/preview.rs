//! Pictures of images of many channels, for display.

use super::image::Bands;
use crate::Rgb8;

/// Quantile of a channel's values that a picture shows as black.
const BLACK_QUANTILE: f64 = 0.02;

/// Quantile of a channel's values that a picture shows as white.
const WHITE_QUANTILE: f64 = 0.98;

/// Returns a picture of `image`: its first three channels as red, green and blue, or its first one
/// as gray. Each channel is stretched from the 2nd to the 98th percentile of its values.
pub fn preview(image: &Bands) -> Rgb8 {
    let stretched: Vec<Vec<u8>> = image.channels().take(3).map(stretch).collect();
    let rgb: [&[u8]; 3] = match stretched.as_slice() {
        [red, green, blue] => [red, green, blue],
        [gray, ..] => [gray; 3],
        [] => [&[]; 3],
    };
    let data = (0..image.n_pixels()).flat_map(|i| rgb.map(|channel| channel[i])).collect();
    Rgb8::new(image.width_px, image.height_px, data)
}

/// Scales the values of a channel to bytes.
fn stretch(channel: &[f32]) -> Vec<u8> {
    let mut values = channel.to_vec();
    let black = quantile(&mut values, BLACK_QUANTILE);
    let white = quantile(&mut values, WHITE_QUANTILE);
    let scale = if white > black { 255.0 / (white - black) } else { 0.0 };
    channel.iter().map(|value| ((value - black) * scale).round() as u8).collect()
}

/// Returns quantile `q` of `values`, rounded down to one of them; changes their order.
fn quantile(values: &mut [f32], q: f64) -> f32 {
    let index = ((values.len() - 1) as f64 * q) as usize;
    *values.select_nth_unstable_by(index, f32::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Depth;

    #[test]
    fn channels_are_stretched_and_a_single_one_is_gray() {
        let values = (0..100).map(|i| 1000.0 + i as f32).chain((0..100).map(|i| -(i as f32))).collect();
        let mut image = Bands { width_px: 10, height_px: 10, depth: Depth::Float, values };
        let picture = preview(&image);
        assert_eq!(
            (picture.data[0], picture.data[3 * 99], picture.data[3 * 50 + 1]),
            (0, 255, picture.data[3 * 50])
        );
        image.values.truncate(100);
        image.values.fill(7.0);
        assert_eq!(preview(&image).data, [0; 300]);
    }
}
