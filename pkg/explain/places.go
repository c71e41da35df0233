// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"encoding/json"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Origin is who put a value there, and where it is written.
type Origin struct {
	Source string      `json:"source"` // for people: network "podnet", the agent files, built in
	Kind   policy.Kind `json:"kind"`
	Name   string      `json:"name,omitempty"` // of a network
	Key    string      `json:"key"`
	// File is where the value stands today. It is missing for what is built in,
	// and where no file says it (any more).
	File string `json:"file,omitempty"`
	// Index is that of the item in its list, in the file if there is one. It is
	// missing for scalars and for what is built in.
	Index *int `json:"index,omitempty"`
	// Since is when the source's document was written, and AgeSeconds how long
	// ago that was. They are missing where that is not known.
	Since      time.Time `json:"since,omitzero"`
	AgeSeconds int64     `json:"ageSeconds,omitzero"`
}

// Places finds where values are written. The zero value knows of no conflists
// and no times; the files of the agents are in the contributions.
type Places struct {
	// ConfDir is the configuration directory of the runtimes.
	ConfDir config.ConfDir
	// Since tells when the document of a source was written, the zero Time
	// where that is not known. It may be nil.
	Since func(policy.SourceID) time.Time
	// Now is the time from which ages are counted. The zero Time tells none.
	Now time.Time
}

func (p Places) origin(o policy.Origin, contributions []policy.Source) Origin {
	out := Origin{Source: o.Source.String(), Kind: o.Source.Kind, Name: o.Source.Name, Key: o.Key}
	at, found := p.find(o, contributions)
	if !found {
		at = place{index: o.Index}
	}
	out.File = at.file
	if at.index >= 0 {
		out.Index = &at.index
	}
	if p.Since == nil || o.Source.Kind == policy.BuiltIn {
		return out
	}
	out.Since = p.Since(o.Source)
	if age := p.Now.Sub(out.Since); !out.Since.IsZero() && age > 0 {
		out.AgeSeconds = int64(age.Seconds())
	}
	return out
}

// place is where a value is written.
type place struct {
	file  string
	index int // of the item in its list there; -1 for a scalar
}

// find returns the place of a value: in one of the agent files as it was read, or in
// the conflist of today.
func (p Places) find(o policy.Origin, sources []policy.Source) (place, bool) {
	at := slices.IndexFunc(sources, func(s policy.Source) bool { return s.ID == o.Source })
	if o.Source.Kind != policy.Network || at < 0 {
		return place{o.File, o.Index}, o.File != ""
	}
	return p.inConflist(o, sources[at].Policy)
}

// inConflist looks into the first conflist by name that has our entry for the
// network, as the runtimes do. What is in force may differ from what it says by
// now; then the value may stand elsewhere in it, or nowhere.
func (p Places) inConflist(o policy.Origin, inForce policy.SourcePolicy) (place, bool) {
	for _, list := range p.ConfDir.Conflists {
		if list.Network != o.Source.Name || len(list.Entries) == 0 {
			continue
		}
		if list.Entries[0].Err != nil {
			return place{}, false
		}
		want, have := valueOf(inForce, o.Key), valueOf(list.Entries[0].Entry.Policy, o.Key)
		if o.Index < 0 {
			return place{list.File, -1}, have != nil && bytes.Equal(want, have)
		}
		wanted, items := itemsOf(want), itemsOf(have)
		if o.Index >= len(wanted) {
			return place{}, false
		}
		same := func(item json.RawMessage) bool { return bytes.Equal(item, wanted[o.Index]) }
		if o.Index < len(items) && same(items[o.Index]) {
			return place{list.File, o.Index}, true
		}
		i := slices.IndexFunc(items, same)
		return place{list.File, i}, i >= 0
	}
	return place{}, false
}

// valueOf returns what a statement says for a key, nil where it says nothing:
// its names in JSON are the keys.
func valueOf(s policy.SourcePolicy, key string) json.RawMessage {
	text, err := json.Marshal(s)
	if err != nil {
		return nil
	}
	var values map[string]json.RawMessage
	if err := json.Unmarshal(text, &values); err != nil {
		return nil
	}
	return values[key]
}

func itemsOf(list json.RawMessage) []json.RawMessage {
	var items []json.RawMessage
	if err := json.Unmarshal(list, &items); err != nil {
		return nil // no list, or none at all
	}
	return items
}
