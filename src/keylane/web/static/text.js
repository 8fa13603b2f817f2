// Numbers, ages and times as people read them. What is unknown is written as such, never as 0.

const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });

export const count = (value) => (value === undefined ? "unknown" : whole.format(value));

export function counted(value, word) {
  return `${whole.format(value)} ${word}${value === 1 ? "" : "s"}`;
}

export function age(seconds) {
  if (seconds === undefined) return "unknown";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 600) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return seconds < 48 * 3600 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at === 0 ? value : value.toFixed(1)} ${units[at]}`;
}

/** A time of today as a time, an earlier one with its day. */
export function when(unix) {
  const at = new Date(unix * 1000);
  const today = at.toDateString() === new Date().toDateString();
  return today ? clock.format(at) : `${day.format(at)}, ${clock.format(at)}`;
}

export const iso = (unix) => new Date(unix * 1000).toISOString();

/** The colour of a member by its place: neighbours are far apart. */
export const hue = (place) => String(Math.round((place * 137.508 + 187) % 360));
