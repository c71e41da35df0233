// SPDX-License-Identifier: Apache-2.0

// Package config turns documents into policy statements: the conflist entry
// that a runtime hands to the plugin, the conflists on disk, the administrators'
// plugin.toml, the agents' files, and the reconciler's own file and flags.
//
// Its invariant: a document is taken whole or refused with all of its mistakes,
// each of which names the key, the item, the value and what to write instead.
// Whatever a document holds, what is said about it is one line of valid UTF-8
// and bounded in length.
//
// A value reaches the reader of its key as JSON text, from whatever format it
// was written in, so every kind of document shares one table of policy keys. The
// agents' files are read in one version of their ConfigMap, never in two.
//
// The verbs, the reconciler and the mains may import it. Of this module it
// imports policy alone.
package config
