// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	nodes "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// yamlMembers returns the keys of a YAML document that is a mapping, with those
// that come twice. More tells that other documents follow it in the stream. JSON
// is read as JSON, whose white space is not all YAML's.
//
// What the values are is the word of the library that the agents use too. Where
// they stand, and what the library would silently do (take one of two equal
// keys, put in copies for aliases), is seen in the tree of another.
func yamlMembers(file string, doc []byte) (members []member, more bool, err error) {
	var tree nodes.Node
	stream := nodes.NewDecoder(bytes.NewReader(doc))
	err = stream.Decode(&tree)
	if looksLikeJSON(doc) {
		members, err := jsonMembers(doc)
		if err != nil {
			return nil, false, fmt.Errorf("%s: %w", shown(file), err)
		}
		addLines(members, &tree)
		return members, false, nil
	}
	switch {
	case errors.Is(err, io.EOF): // nothing but comments
		return nil, false, nil
	case err != nil:
		return nil, false, yamlError(file, err)
	}
	top := tree.Content[0]
	if err := refused(top, false); err != nil {
		return nil, false, fmt.Errorf("%s:%w", shown(file), err)
	}
	text, err := yaml.YAMLToJSON(doc)
	if err != nil {
		return nil, false, yamlError(file, err)
	}
	if kindOf(text) == nothing {
		return nil, moreFollows(stream), nil
	}
	if k := kindOf(text); k != anObject || top.Kind != nodes.MappingNode {
		return nil, false, fmt.Errorf("%s:%d: is %s; write keys with values, such as nonMasqueradeCIDRs: [10.0.0.0/8]", shown(file), top.Line, k)
	}
	// Of keys that come twice, the tree has both and the values the last.
	values := map[string]json.RawMessage{}
	parts := elements(bytes.TrimSpace(text))
	for i := 0; i+1 < len(parts); i += 2 {
		name, _ := stringIn(parts[i])
		values[name] = parts[i+1]
	}
	for i := 0; i+1 < len(top.Content); i += 2 {
		m := member{key: top.Content[i].Value}
		value, isThere := values[m.key]
		if m.value = value; !isThere {
			m.err = errors.New("is not a plain key; write the key as it is, without a tag")
		}
		members = append(members, m)
	}
	addLines(members, &tree)
	return members, moreFollows(stream), nil
}

func looksLikeJSON(doc []byte) bool {
	return bytes.HasPrefix(bytes.TrimSpace(doc), []byte("{")) && json.Valid(doc)
}

// refused finds what no document may hold, and says on which line.
func refused(n *nodes.Node, nested bool) error {
	switch {
	case n.Kind == nodes.AliasNode:
		return fmt.Errorf("%d: *%s: aliases are not read; write out what it stands for", n.Line, shown(n.Value))
	case n.Anchor != "":
		return fmt.Errorf("%d: &%s: anchors are not read; remove it, and write out what refers to it", n.Line, shown(n.Anchor))
	}
	names := map[string]bool{}
	for i, child := range n.Content {
		if n.Kind == nodes.MappingNode && i%2 == 0 {
			switch {
			case child.Kind == nodes.ScalarNode && child.ShortTag() == "!!merge":
				return fmt.Errorf("%d: <<: merges are not read; write out the keys", child.Line)
			case child.Kind != nodes.ScalarNode && child.Kind != nodes.AliasNode, child.ShortTag() == "!!binary":
				return fmt.Errorf("%d: has a key that is no text; write the name of a key", child.Line)
			case nested && names[child.Value]:
				return fmt.Errorf("%d: %s: is there twice; write it once", child.Line, shown(child.Value))
			}
			names[child.Value] = true
		}
		if err := refused(child, true); err != nil {
			return err
		}
	}
	return nil
}

// addLines says where the keys stand, in the order of a tree that has as many.
func addLines(members []member, tree *nodes.Node) {
	if len(tree.Content) == 0 || len(tree.Content[0].Content) != 2*len(members) {
		return
	}
	pairs := tree.Content[0].Content
	for i := range members {
		name, value := pairs[2*i], pairs[2*i+1]
		members[i].line = name.Line
		if value.Kind != nodes.SequenceNode {
			continue
		}
		for _, item := range value.Content {
			members[i].items = append(members[i].items, item.Line)
		}
	}
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

// yamlError makes one line of what a YAML library says, with the line of the
// document in front where there is one.
func yamlError(file string, err error) error {
	said := strings.TrimPrefix(strings.Join(strings.Fields(err.Error()), " "), "yaml: ")
	line := ""
	if rest, found := strings.CutPrefix(said, "line "); found {
		if digits, rest, found := strings.Cut(rest, ": "); found {
			line, said = digits+":", rest
		}
	}
	return fmt.Errorf("%s:%s not YAML: %s", shown(file), line, shown(said))
}
