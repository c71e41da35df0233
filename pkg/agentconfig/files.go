// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	nodes "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Files is the policy of the agent files and of the reconciler's own settings: one source.
type Files struct {
	Dir     string
	Missing bool     // there is no such directory
	Names   []string // of the files that were read, sorted

	// Source lists the reconciler's own policy (config.OwnPolicy) and then the files with a policy, sorted by path.
	// After an error only its ID is set.
	Source policy.Source

	// ResyncInterval is the shortest resyncInterval of all files, or 0 if no file states one.
	ResyncInterval time.Duration

	// UnknownKeys and Warnings are the same, in the same order, for the same files.
	UnknownKeys []string // messages about keys that are ignored
	Warnings    []string
}

// Read reads the agent files of a directory. If dir is "" or missing, the reconciler's own policy is the source. An
// error is about the directory, or a config.DocumentError with every mistake in the files.
func Read(dir string, d config.Dialect, own config.AgentPolicy) (Files, error) {
	a := Files{Dir: dir, Source: policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}}}
	docs := []*document{{Document: config.Document{File: config.OwnPolicy}, AgentPolicy: own}}
	if dir != "" {
		files, others, err := readDir(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			a.Missing = true
		case err != nil:
			return a, safefile.Error("read the agent files in", dir, err)
		case len(files) == 0 && others:
			a.Warnings = append(a.Warnings, fmt.Sprintf("%s has files, but the name of none begins with %s; rename the agent files",
				policy.Printable(dir), filePrefix))
		}
		for _, f := range files {
			docs = append(docs, f.parse(d))
			if f.err == nil {
				a.Names = append(a.Names, f.name)
			}
		}
	}
	source, mistakes := merge(docs)
	for _, doc := range docs {
		a.UnknownKeys = append(a.UnknownKeys, doc.unknown...)
		a.Warnings = append(a.Warnings, doc.warnings...)
		if len(mistakes) == 0 && doc.resync > 0 && (a.ResyncInterval == 0 || doc.resync < a.ResyncInterval) {
			a.ResyncInterval = doc.resync
		}
	}
	if len(mistakes) > 0 {
		return a, &config.DocumentError{Mistakes: mistakes}
	}
	a.Source = source
	return a, nil
}

// merge makes one source of the documents, or returns all mistakes, or else the conflicts between them.
func merge(docs []*document) (s policy.Source, mistakes []error) {
	s.ID = policy.SourceID{Kind: policy.AgentFiles}
	s.Policy.Chain = policy.DefaultChain
	ipv6 := slices.ContainsFunc(docs, func(d *document) bool { // or it is unknown because of another mistake
		return d.unread || d.Flawed["enableIPv6"] || d.Policy.EnableIPv6 != nil && *d.Policy.EnableIPv6
	})
	for _, d := range docs {
		d.Validate(&d.Document, ipv6)
		mistakes = append(mistakes, d.Mistakes...)
	}
	if len(mistakes) > 0 {
		return s, mistakes
	}
	var named *document // the first one that names the chain
	for _, d := range docs {
		switch chain := d.Policy.Chain; {
		case chain == "":
		case named == nil:
			named, s.Policy.Chain = d, chain
		case chain != s.Policy.Chain:
			mistakes = append(mistakes, d.conflict("masqChain", -1, chain+" conflicts with "+s.Policy.Chain, named))
		}
	}
	byFile := map[string]*document{}
	for _, d := range docs {
		byFile[d.File] = d
		if d.Policy.Chain = s.Policy.Chain; !d.Policy.Equal(s.Policy) {
			s.Files = append(s.Files, policy.FilePolicy{File: d.File, Policy: d.Policy})
		}
	}
	merged := policy.Merge([]policy.Source{s})[0]
	for _, err := range merged.ScopeErrors() {
		mistakes = append(mistakes, fmt.Errorf("the agent files together: %w", err))
	}
	for _, c := range merged.Conflicts {
		key, d, other := c.Superseded.Key, byFile[c.Superseded.File], byFile[c.InForce.File]
		with := c.InForceValue
		if c.InForce.Key != key {
			with = fmt.Sprintf("%s[%d]", c.InForce.Key, other.Index(c.InForce.Key, c.InForce.Index))
		}
		index := d.Index(key, c.Superseded.Index)
		mistakes = append(mistakes, d.conflict(key, index, c.SupersededValue+" conflicts with "+with, other))
	}
	return s, mistakes
}

func (d *document) conflict(key string, index int, problem string, other *document) error {
	remedy := "write the same in both, or leave it out of one"
	if index >= 0 {
		remedy = "remove one of the two"
	}
	return d.Locate(d.Lines[key], &policy.FieldError{
		Key: key, Index: index, Problem: fmt.Sprintf("%s in %s; %s", problem, policy.Printable(other.File), remedy),
	})
}

const (
	// filePrefix is the start of the names of the agent files.
	filePrefix = "ip-masq"
	// configMapData is the link in a mounted ConfigMap to the directory with the current
	// version of the files. The kubelet replaces all files by replacing it.
	configMapData = "..data"
)

// file is one of the agent files, or why it cannot be read.
type file struct {
	name, path string
	text       []byte
	err        error
}

var errChanged = errors.New("it changes faster than it can be read, or " + configMapData + " leads to nothing: mount the ConfigMap again, or remove the link")

// readDir returns one version of the agent files by name, and whether the directory has other files.
func readDir(dir string) (files []file, others bool, err error) {
	for range 1000 { // attempts
		if files, others, err = readDirOnce(dir); !errors.Is(err, errChanged) {
			break
		}
	}
	return files, others, err
}

func readDirOnce(dir string) (files []file, others bool, err error) {
	link := filepath.Join(dir, configMapData)
	version, _ := os.Readlink(link) // none in a directory that is no ConfigMap
	from := filepath.Join(dir, version)
	if filepath.IsAbs(version) {
		from = version
	}
	entries, err := os.ReadDir(from)
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		return nil, false, errors.New("not a directory; name the directory that holds the files")
	case errors.Is(err, fs.ErrNotExist) && version != "": // the kubelet has removed it
		return nil, false, errChanged
	case err != nil:
		return nil, false, err
	}
	for _, e := range entries {
		name := e.Name()
		if !strings.HasPrefix(name, filePrefix) || strings.HasSuffix(name, "~") {
			others = others || !strings.HasPrefix(name, ".") && !e.IsDir()
			continue
		}
		text, _, err := safefile.ReadFile(filepath.Join(from, name), 1<<20)
		switch {
		case errors.Is(err, fs.ErrNotExist): // it was in the directory, and may be there again
			return nil, false, errChanged
		case err != nil:
			err = fmt.Errorf("%w; fix it, remove it, or give it a name that does not begin with %s", err, filePrefix)
		}
		files = append(files, file{name, filepath.Join(dir, name), text, err})
	}
	// The kubelet removes the files of a version, one after another, once the link leads to the next.
	if now, _ := os.Readlink(link); now != version {
		return nil, false, errChanged
	}
	return files, others, nil
}

// document is an agent file, or the policy in the reconciler's own settings.
type document struct {
	config.Document
	config.AgentPolicy
	resync   time.Duration // 0 if it has none
	unread   bool          // its policy is unknown
	unknown  []string      // about keys that are not known
	warnings []string
}

// parse parses the file. Its mistakes are those that show before it is validated.
func (f file) parse(dialect config.Dialect) *document {
	d := &document{Document: config.Document{File: f.path}}
	members, err := membersOf(f.path, f.text)
	if err = cmp.Or(f.err, err); err != nil {
		d.unread, d.Mistakes = true, []error{err}
		return d
	}
	keys := append(d.Keys(), config.Key{Name: "resyncInterval", Value: config.Interval(&d.resync)})
	d.Read(d.known(members, keys), keys)
	if s := &d.Policy; dialect == config.DialectV2 && s.NonMasqueradeCIDRs == nil && !d.Flawed["nonMasqueradeCIDRs"] {
		s.NonMasqueradeCIDRs = []netip.Prefix{}
	}
	return d
}

// known returns the members with known keys, in any letter case, as in the agents. It warns
// about what the agents ignore: unknown keys, and values that are null.
func (d *document) known(members []config.Member, keys []config.Key) []config.Member {
	var kept []config.Member
	unknownKeys, unknown := config.NewUnknownKeys(members, keys), 0
	warn := func(to *[]string, m config.Member, problem string) {
		*to = append(*to, d.Locate(m.Line, &policy.FieldError{Key: m.Key, Index: -1, Problem: problem}).Error())
	}
	for _, m := range members {
		at := slices.IndexFunc(keys, func(k config.Key) bool { return strings.EqualFold(k.Name, m.Key) })
		if at < 0 {
			if unknown++; unknown > config.MaxShown {
				continue
			}
			if remedy := unknownKeys.Remedy(m.Key); remedy != "" {
				warn(&d.unknown, m, "is not a known key and is ignored; "+remedy)
			}
			continue
		}
		m.Key = keys[at].Name
		switch isNull := m.Err == nil && config.KindOf(m.Value) == config.Null; {
		case isNull && keys[at].Kind == config.List:
			warn(&d.warnings, m, "null is taken for an empty list; write [] for none, or leave the key out")
			m.Value = json.RawMessage("[]")
		case isNull:
			warn(&d.warnings, m, "null is taken as not stated; write a value, or leave the key out")
			keys[at].Value = config.Value{}
		case m.Key == "guard" && string(m.Value) == "false": // what YAML makes of off
			m.Value = json.RawMessage(`"off"`)
		}
		kept = append(kept, m)
	}
	if more := unknown - config.MaxShown; more > 0 {
		d.unknown = append(d.unknown, d.Locate(0, fmt.Errorf("%d more unknown keys are ignored; remove them", more)).Error())
	}
	return kept
}

// membersOf returns the keys of a YAML or JSON text, repeated ones included. The values are those of sigs.k8s.io/yaml, which the
// agents use; only the node tree of the other library shows repeated keys, aliases and lines.
func membersOf(file string, text []byte) (members []config.Member, err error) {
	keys, line, err := keysOf(file, text)
	if bytes.HasPrefix(bytes.TrimSpace(text), []byte("{")) && json.Valid(text) {
		// JSON allows white space and escapes that YAML does not.
		members, err = config.JSONMembers(text)
		for i := 0; i < len(members) && len(keys) == len(members); i++ {
			members[i].Line = keys[i].Line
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", policy.Printable(file), err)
		}
		return members, err
	}
	if err != nil {
		return nil, err
	}
	asJSON, err := yaml.YAMLToJSON(text)
	if err != nil {
		return nil, notYAML(file, err)
	}
	whole := json.RawMessage(bytes.TrimSpace(asJSON))
	switch kind := config.KindOf(whole); {
	case kind == config.Null:
		return nil, nil
	case kind != config.Object || keys == nil:
		return nil, fmt.Errorf("%s:%d: is %s; write keys with values, such as nonMasqueradeCIDRs: [10.0.0.0/8]", policy.Printable(file), line, kind)
	}
	var values map[string]json.RawMessage
	if err := json.Unmarshal(whole, &values); err != nil {
		return nil, notYAML(file, err)
	}
	for i := range keys {
		if keys[i].Value = values[keys[i].Key]; keys[i].Value == nil {
			keys[i].Err = errors.New("is not a plain key; write the key as it is, without a tag")
		}
	}
	return keys, nil
}

// keysOf returns the keys of a mapping without their values, and the line on which the document begins.
func keysOf(file string, text []byte) (keys []config.Member, line int, err error) {
	switch {
	case bytes.HasPrefix(text, []byte("\xfe\xff")), bytes.HasPrefix(text, []byte("\xff\xfe")):
		return nil, 0, syntaxError(file, 0, "not YAML", "it is UTF-16; save it as UTF-8")
	case bytes.HasPrefix(text, []byte("%TAG")), bytes.Contains(text, []byte("\n%TAG")): // takes quadratic time: half a minute for 1 MiB
		return nil, 0, syntaxError(file, 0, "%TAG", "directives are not read; remove it")
	}
	stream := nodes.NewDecoder(bytes.NewReader(text))
	var tree nodes.Node
	top := &tree
	switch err := stream.Decode(&tree); {
	case errors.Is(err, io.EOF): // nothing but comments
	case err != nil:
		return nil, 0, notYAML(file, err)
	default:
		top = tree.Content[0]
	}
	if a := aliasIn(top); a != nil {
		return nil, 0, syntaxError(file, a.Line, "*"+a.Value, "aliases are not read; write out what it stands for")
	}
	for {
		var next nodes.Node
		err := stream.Decode(&next)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || next.Content[0].ShortTag() != "!!null" {
			return nil, 0, syntaxError(file, next.Line, "", "is another document; join them, or write one file for each")
		}
	}
	if top.Kind == nodes.MappingNode {
		keys = []config.Member{}
		for pair := range slices.Chunk(top.Content, 2) {
			keys = append(keys, config.Member{Key: pair[0].Value, Line: pair[0].Line})
		}
	}
	return keys, max(top.Line, 1), nil
}

// aliasIn returns the first alias below a node, which may stand for gigabytes, or nil.
func aliasIn(n *nodes.Node) *nodes.Node {
	if n.Kind == nodes.AliasNode {
		return n
	}
	for _, child := range n.Content {
		if a := aliasIn(child); a != nil {
			return a
		}
	}
	return nil
}

// notYAML makes one line of an error of a YAML library, which may begin with a line number.
func notYAML(file string, err error) error {
	problem := strings.TrimPrefix(strings.Join(strings.Fields(err.Error()), " "), "yaml: ")
	var line int
	if n, _ := fmt.Sscanf(problem, "line %d:", &line); n == 1 {
		_, problem, _ = strings.Cut(problem, ": ")
	}
	return syntaxError(file, line, "not YAML", problem)
}

// syntaxError returns FILE:LINE: SUBJECT: PROBLEM, without the line if it is 0.
func syntaxError(file string, line int, subject, problem string) error {
	text := policy.Printable(problem)
	if subject != "" {
		text = policy.Printable(subject) + ": " + text
	}
	return (&config.Document{File: file}).Locate(line, errors.New(text))
}
