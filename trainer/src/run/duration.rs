//! Lengths of time in words.

/// Formats a length of time in whole seconds, in its two largest units: `1 h 20 min`.
pub fn format_duration(seconds: f64) -> String {
    let s = seconds.max(0.0).round() as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..172_800 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} days {} h", s / 86_400, s / 3600 % 24),
    }
}

/// Formats a measured time, which may be short: `290 ms`, `3.2 s`, `1 min 55 s`.
pub fn format_time(seconds: f64) -> String {
    match seconds.max(0.0) {
        s if s < 0.9995 => format!("{:.0} ms", 1e3 * s),
        s if s < 9.95 => format!("{s:.1} s"),
        s => format_duration(s),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_two_units() {
        assert_eq!(format_duration(59.2), "59 s");
        assert_eq!(format_duration(125.0), "2 min 5 s");
        assert_eq!(format_duration(5000.0), "1 h 23 min");
        assert_eq!(format_duration(200_000.0), "2 days 7 h");
    }

    #[test]
    fn short_times_have_two_digits_at_least() {
        assert_eq!(format_time(0.0), "0 ms");
        assert_eq!(format_time(0.2896), "290 ms");
        assert_eq!(format_time(0.9999), "1.0 s");
        assert_eq!(format_time(3.24), "3.2 s");
        assert_eq!(format_time(9.97), "10 s");
        assert_eq!(format_time(115.289), "1 min 55 s");
    }
}
