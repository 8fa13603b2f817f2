// Nodes described as plain values, and the real ones changed to match. Texts are only ever set as text, never as markup.

export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: children.flat(Infinity).filter((one) => one != null && one !== false) };
}

/** Make the children of a node what the list says. Children with a `key` keep their nodes when they change places. */
export function patch(parent, list) {
  const wanted = [list].flat(Infinity).filter((one) => one != null && one !== false);
  const keyed = new Map();
  for (const node of parent.childNodes) if (node.laneKey !== undefined) keyed.set(node.laneKey, node);
  let at = parent.firstChild;
  for (const one of wanted) {
    const key = one.props?.key;
    let node = key !== undefined ? keyed.get(key) : at?.laneKey === undefined ? at : null;
    if (!node || !fits(node, one)) node = create(one);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
    update(node, one);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function fits(node, one) {
  return one.tag === undefined ? node.nodeType === 3 : node.nodeType === 1 && node.localName === one.tag;
}

function create(one) {
  if (one.tag === undefined) return document.createTextNode("");
  const node = document.createElement(one.tag);
  if (one.props.key !== undefined) node.laneKey = one.props.key;
  return node;
}

function update(node, one) {
  if (one.tag === undefined) {
    const text = String(one);
    if (node.data !== text) node.data = text;
    return;
  }
  const before = node.laneProps ?? {};
  for (const name in before) if (!(name in one.props)) set(node, name, null, before[name]);
  for (const name in one.props) set(node, name, one.props[name], before[name]);
  node.laneProps = one.props;
  if (!one.props.isOwn) patch(node, one.children);
}

function set(node, name, value, before) {
  if (name === "key" || name === "isOwn") return;
  if (name === "on") {
    for (const kind in before ?? {}) if (!(kind in (value ?? {}))) node.removeEventListener(kind, dispatch);
    for (const kind in value ?? {}) if (!(kind in (before ?? {}))) node.addEventListener(kind, dispatch);
    return;
  }
  if (name === "style") {
    for (const each in value ?? {}) if (value[each] !== before?.[each]) node.style.setProperty(each, value[each]);
    for (const each in before ?? {}) if (!(each in (value ?? {}))) node.style.removeProperty(each);
    return;
  }
  if (value === before) return;
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : value);
}

function dispatch(event) {
  event.currentTarget.laneProps?.on?.[event.type]?.(event);
}
