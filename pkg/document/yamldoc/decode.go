// SPDX-License-Identifier: Apache-2.0

package yamldoc

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"

	nodes "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/pkg/document"
)

// Decode reads the first document of a stream. What the values are is the word
// of the library that the agents use too. Where they stand, and what that
// library would silently do (take one of two equal keys, put in copies for
// aliases), is seen in the tree of another.
//
// The error is a document.Error.
func Decode(text []byte) (document.Document, error) {
	switch {
	case bytes.HasPrefix(text, []byte("\xfe\xff")), bytes.HasPrefix(text, []byte("\xff\xfe")):
		return document.Document{}, &document.Error{Subject: "not YAML", Problem: "it is UTF-16; save it as UTF-8"}
	case bytes.Contains(text, []byte("%TAG")): // each is held against all others: a file of 1 MiB takes half a minute
		return document.Document{}, &document.Error{Subject: "%TAG", Problem: "directives are not read; remove it"}
	}
	var tree nodes.Node
	stream := nodes.NewDecoder(bytes.NewReader(text))
	err := stream.Decode(&tree)
	isEmpty := errors.Is(err, io.EOF) // but for comments
	if err != nil && !isEmpty {
		return document.Document{}, notYAML(err)
	}
	top := &nodes.Node{}
	if !isEmpty {
		top = tree.Content[0]
	}
	if refused := refusal(top, false); refused != nil {
		return document.Document{}, refused
	}
	d := document.Document{Line: max(top.Line, 1), Keys: keysOf(top)}
	d.More = moreFollows(stream) // the last use of the tree, whose memory the other library may have
	if d.JSON, err = yaml.YAMLToJSON(text); err != nil {
		return document.Document{}, notYAML(err)
	}
	return d, nil
}

// keysOf returns the keys of a mapping with the lines on which they stand.
func keysOf(top *nodes.Node) []document.Key {
	if top.Kind != nodes.MappingNode {
		return nil
	}
	keys := make([]document.Key, 0, len(top.Content)/2)
	for i := 0; i+1 < len(top.Content); i += 2 {
		name, value := top.Content[i], top.Content[i+1]
		k := document.Key{Name: name.Value, Line: name.Line}
		if value.Kind == nodes.SequenceNode {
			for _, item := range value.Content {
				k.Items = append(k.Items, item.Line)
			}
		}
		keys = append(keys, k)
	}
	return keys
}

// refusal finds what no document may hold.
func refusal(n *nodes.Node, nested bool) error {
	switch {
	case n.Kind == nodes.AliasNode:
		return &document.Error{Line: n.Line, Subject: "*" + n.Value, Problem: "aliases are not read; write out what it stands for"}
	case n.Anchor != "":
		return &document.Error{Line: n.Line, Subject: "&" + n.Anchor, Problem: "anchors are not read; remove it, and write out what refers to it"}
	}
	names := map[string]bool{}
	for i, child := range n.Content {
		if n.Kind == nodes.MappingNode && i%2 == 0 {
			switch {
			case child.Kind == nodes.ScalarNode && child.ShortTag() == "!!merge":
				return &document.Error{Line: child.Line, Subject: "<<", Problem: "merges are not read; write out the keys"}
			case child.Kind != nodes.ScalarNode && child.Kind != nodes.AliasNode, child.ShortTag() == "!!binary":
				return &document.Error{Line: child.Line, Problem: "has a key that is no text; write the name of a key"}
			case nested && names[child.Value]:
				return &document.Error{Line: child.Line, Subject: child.Value, Problem: "is there twice; write it once"}
			}
			names[child.Value] = true
		}
		if err := refusal(child, true); err != nil {
			return err
		}
	}
	return nil
}

// moreFollows reports whether another document of the stream says anything.
func moreFollows(stream *nodes.Decoder) bool {
	for {
		var next nodes.Node
		switch err := stream.Decode(&next); {
		case errors.Is(err, io.EOF):
			return false
		case err != nil || !isNull(&next):
			return true
		}
	}
}

// isNull reports whether a document says nothing at all.
func isNull(document *nodes.Node) bool {
	if len(document.Content) == 0 {
		return true
	}
	top := document.Content[0]
	return top.Kind == nodes.ScalarNode && top.Anchor == "" && top.ShortTag() == "!!null"
}

// notYAML makes one line of what a YAML library says, and finds the number of
// the document's line in it.
func notYAML(err error) error {
	said := strings.TrimPrefix(strings.Join(strings.Fields(err.Error()), " "), "yaml: ")
	e := &document.Error{Subject: "not YAML", Problem: said}
	if rest, found := strings.CutPrefix(said, "line "); found {
		if digits, rest, found := strings.Cut(rest, ": "); found {
			if line, err := strconv.Atoi(digits); err == nil {
				e.Line, e.Problem = line, rest
			}
		}
	}
	return e
}
