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

	// Source lists the reconciler's own policy (config.OwnPolicy) and then the files with a policy, sorted by
	// path. After an error only its ID is set.
	Source policy.Source

	// ResyncInterval is the shortest resyncInterval of all files, or 0 if no file states one.
	ResyncInterval time.Duration

	// UnknownKeys and Warnings are the same, in the same order, for the same files.
	UnknownKeys []string // messages about keys that are ignored
	Warnings    []string
}

// Read reads the agent files of a directory. If dir is "" or missing, the reconciler's own policy is the
// source. An error is about the directory, or a config.DocumentError with every mistake in the files.
func Read(dir string, d config.Dialect, own config.AgentPolicy) (Files, error) {
	a := Files{Dir: dir, Source: policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}}}
	docs := []*document{{doc: config.Document{File: config.OwnPolicy}, stated: own}}
	if dir != "" {
		files, others, err := readDir(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			a.Missing = true
		case err != nil:
			return a, safefile.Error("read the agent files in", dir, err)
		case len(files) == 0 && others:
			const none = "%s has files, but the name of none begins with %s; rename the agent files"
			a.Warnings = append(a.Warnings, fmt.Sprintf(none, policy.Printable(dir), filePrefix))
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
	}
	if len(mistakes) > 0 {
		return a, &config.DocumentError{Mistakes: mistakes}
	}
	a.Source = source
	a.ResyncInterval = shortestInterval(docs)
	return a, nil
}

// shortestInterval returns the shortest resyncInterval that a document states, or 0.
func shortestInterval(docs []*document) (shortest time.Duration) {
	for _, d := range docs {
		if d.resync > 0 && (shortest == 0 || d.resync < shortest) {
			shortest = d.resync
		}
	}
	return shortest
}

// merge makes one source of the documents. Otherwise it returns all mistakes in them or, without any, the
// conflicts between them.
func merge(docs []*document) (s policy.Source, mistakes []error) {
	s.ID = policy.SourceID{Kind: policy.AgentFiles}
	ipv6 := mayEnableIPv6(docs)
	for _, d := range docs {
		d.stated.Validate(&d.doc, ipv6)
		mistakes = append(mistakes, d.doc.Mistakes...)
	}
	if len(mistakes) > 0 {
		return s, mistakes
	}
	s.Policy.Chain, mistakes = chainOf(docs)
	nothing := policy.SourcePolicy{Chain: s.Policy.Chain}
	byFile := map[string]*document{}
	for _, d := range docs {
		byFile[d.doc.File] = d
		stated := d.stated.Policy
		stated.Chain = s.Policy.Chain
		if !stated.Equal(nothing) {
			s.Files = append(s.Files, policy.FilePolicy{File: d.doc.File, Policy: stated})
		}
	}
	merged := policy.Merge([]policy.Source{s})[0]
	for _, err := range merged.ScopeErrors() {
		mistakes = append(mistakes, fmt.Errorf("the agent files together: %w", err))
	}
	for _, c := range merged.Conflicts {
		mistakes = append(mistakes, conflictOf(c, byFile))
	}
	return s, mistakes
}

// mayEnableIPv6 reports whether a document enables IPv6, or may, as another mistake hides it.
func mayEnableIPv6(docs []*document) bool {
	for _, d := range docs {
		stated := d.stated.Policy.EnableIPv6
		isEnabled := stated != nil && *stated
		if d.unread || d.doc.Flawed["enableIPv6"] || isEnabled {
			return true
		}
	}
	return false
}

// chainOf returns the chain of the documents, which those must agree on that name one.
func chainOf(docs []*document) (chain string, mistakes []error) {
	var named *document // the first one that names the chain
	for _, d := range docs {
		stated := d.stated.Policy.Chain
		if stated == "" {
			continue
		}
		if named == nil {
			named, chain = d, stated
		}
		if stated != chain {
			problem := stated + " conflicts with " + chain
			mistakes = append(mistakes, d.conflict("masqChain", -1, problem, named))
		}
	}
	return cmp.Or(chain, policy.DefaultChain), mistakes
}

// conflictOf returns the mistake of the document that is superseded in a conflict.
func conflictOf(c *policy.ConflictError, byFile map[string]*document) error {
	key, d, other := c.Superseded.Key, byFile[c.Superseded.File], byFile[c.InForce.File]
	with := c.InForceValue
	if c.InForce.Key != key {
		with = fmt.Sprintf("%s[%d]", c.InForce.Key, other.doc.Index(c.InForce.Key, c.InForce.Index))
	}
	index := d.doc.Index(key, c.Superseded.Index)
	return d.conflict(key, index, c.SupersededValue+" conflicts with "+with, other)
}

func (d *document) conflict(key string, index int, problem string, other *document) error {
	remedy := "write the same in both, or leave it out of one"
	if index >= 0 {
		remedy = "remove one of the two"
	}
	problem = fmt.Sprintf("%s in %s; %s", problem, policy.Printable(other.doc.File), remedy)
	return d.doc.Locate(d.doc.Lines[key], &policy.FieldError{Key: key, Index: index, Problem: problem})
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

var errChanged = errors.New("it changes faster than it can be read, or " + configMapData +
	" leads to nothing: mount the ConfigMap again, or remove the link")

// readDir returns one version of the agent files by name, and whether the directory has other files.
func readDir(dir string) (files []file, others bool, err error) {
	const attempts = 1000
	for range attempts {
		files, others, err = readDirOnce(dir)
		if !errors.Is(err, errChanged) {
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
		isAgentFile := strings.HasPrefix(name, filePrefix) && !strings.HasSuffix(name, "~")
		if !isAgentFile {
			isHidden := strings.HasPrefix(name, ".")
			others = others || !isHidden && !e.IsDir()
			continue
		}
		text, _, err := safefile.ReadFile(filepath.Join(from, name), 1<<20)
		switch {
		case errors.Is(err, fs.ErrNotExist): // it was in the directory, and may be there again
			return nil, false, errChanged
		case err != nil:
			const remedy = "fix it, remove it, or give it a name that does not begin with"
			err = fmt.Errorf("%w; %s %s", err, remedy, filePrefix)
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
	doc      config.Document
	stated   config.AgentPolicy
	resync   time.Duration // 0 if it has none
	unread   bool          // its policy is unknown
	unknown  []string      // about keys that are not known
	warnings []string
}

// parse parses the file. Its mistakes are those of reading it; merge validates it.
func (f file) parse(dialect config.Dialect) *document {
	d := &document{doc: config.Document{File: f.path}}
	members, err := membersOf(f.path, f.text)
	err = cmp.Or(f.err, err)
	if err != nil {
		d.unread, d.doc.Mistakes = true, []error{err}
		return d
	}
	keys := append(d.stated.Keys(), config.Key{Name: "resyncInterval", Value: config.Interval(&d.resync)})
	known := d.known(members, keys) // first, as it excludes keys whose value is null
	d.doc.Read(known, keys)
	statesNone := d.stated.Policy.NonMasqueradeCIDRs == nil && !d.doc.Flawed["nonMasqueradeCIDRs"]
	if dialect == config.DialectV2 && statesNone {
		d.stated.Policy.NonMasqueradeCIDRs = []netip.Prefix{}
	}
	return d
}

// known returns the members with known keys, in any letter case, as in the agents. It warns
// about what the agents ignore: unknown keys, and values that are null.
func (d *document) known(members []config.Member, keys []config.Key) (known []config.Member) {
	unknownKeys, unknown := config.NewUnknownKeys(members, keys), 0
	for _, m := range members {
		key := keyNamed(keys, m.Key)
		if key != nil {
			m.Key = key.Name
			known = append(known, withGuardOff(d.withoutNull(m, key)))
			continue
		}
		unknown++
		if unknown > config.MaxShown {
			continue
		}
		if remedy := unknownKeys.Remedy(m.Key); remedy != "" {
			d.unknown = append(d.unknown, d.about(m, "is not a known key and is ignored; "+remedy))
		}
	}
	if more := unknown - config.MaxShown; more > 0 {
		err := fmt.Errorf("%d more unknown keys are ignored; remove them", more)
		d.unknown = append(d.unknown, d.doc.Locate(0, err).Error())
	}
	return known
}

// keyNamed returns the key of a name in any letter case, or nil.
func keyNamed(keys []config.Key, name string) *config.Key {
	for i := range keys {
		if strings.EqualFold(keys[i].Name, name) {
			return &keys[i]
		}
	}
	return nil
}

// withoutNull returns a member without the value null, and warns. For a list, null becomes an empty list.
// Any other key counts as not stated: it gets the empty Value, so that it is not read. Its member stays, as a
// second one of that name is a repeated key.
func (d *document) withoutNull(m config.Member, key *config.Key) config.Member {
	isNull := m.Err == nil && config.KindOf(m.Value) == config.Null
	if !isNull {
		return m
	}
	if key.Kind == config.List {
		d.warn(m, "null is taken for an empty list; write [] for none, or leave the key out")
		m.Value = json.RawMessage("[]")
		return m
	}
	d.warn(m, "null is taken as not stated; write a value, or leave the key out")
	key.Value = config.Value{}
	return m
}

func (d *document) warn(m config.Member, problem string) {
	d.warnings = append(d.warnings, d.about(m, problem))
}

// withGuardOff returns a member with the word off as the value of guard, of which YAML makes false.
func withGuardOff(m config.Member) config.Member {
	if m.Key == "guard" && string(m.Value) == "false" {
		m.Value = json.RawMessage(`"off"`)
	}
	return m
}

// about returns a message about a member.
func (d *document) about(m config.Member, problem string) string {
	return d.doc.Locate(m.Line, &policy.FieldError{Key: m.Key, Index: -1, Problem: problem}).Error()
}

// membersOf returns the keys of a YAML or JSON text, repeated ones included. The values are those of
// sigs.k8s.io/yaml, which the agents use; only the node tree of the other library shows repeated keys,
// aliases and lines.
func membersOf(file string, text []byte) (members []config.Member, err error) {
	keys, line, yamlErr := keysOf(file, text)
	isJSON := bytes.HasPrefix(bytes.TrimSpace(text), []byte("{")) && json.Valid(text)
	if isJSON { // which allows white space and escapes that YAML does not; the keys are for their lines
		return jsonMembers(file, text, keys)
	}
	if yamlErr != nil {
		return nil, yamlErr
	}
	asJSON, err := yaml.YAMLToJSON(text)
	if err != nil {
		return nil, notYAML(file, err)
	}
	whole := json.RawMessage(bytes.TrimSpace(asJSON))
	kind := config.KindOf(whole)
	switch {
	case kind == config.Null:
		return nil, nil
	case kind != config.Object || keys == nil:
		const remedy = "write keys with values, such as nonMasqueradeCIDRs: [10.0.0.0/8]"
		return nil, fmt.Errorf("%s:%d: is %s; %s", policy.Printable(file), line, kind, remedy)
	}
	var values map[string]json.RawMessage
	if err := json.Unmarshal(whole, &values); err != nil {
		return nil, notYAML(file, err)
	}
	for i := range keys {
		keys[i].Value = values[keys[i].Key]
		if keys[i].Value == nil {
			keys[i].Err = errors.New("is not a plain key; write the key as it is, without a tag")
		}
	}
	return keys, nil
}

// jsonMembers returns the keys of a JSON text, with the lines of the same keys as YAML if they are known.
func jsonMembers(file string, text []byte, asYAML []config.Member) ([]config.Member, error) {
	members, err := config.JSONMembers(text)
	if len(asYAML) == len(members) {
		for i := range members {
			members[i].Line = asYAML[i].Line
		}
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", policy.Printable(file), err)
	}
	return members, err
}

// keysOf returns the keys of a mapping without their values, and the line on which the document begins.
func keysOf(file string, text []byte) (keys []config.Member, line int, err error) {
	isUTF16 := bytes.HasPrefix(text, []byte("\xfe\xff")) || bytes.HasPrefix(text, []byte("\xff\xfe"))
	if isUTF16 {
		return nil, 0, syntaxError(file, 0, "not YAML", "it is UTF-16; save it as UTF-8")
	}
	// The library takes quadratic time for it: half a minute for 1 MiB.
	hasTag := bytes.HasPrefix(text, []byte("%TAG")) || bytes.Contains(text, []byte("\n%TAG"))
	if hasTag {
		return nil, 0, syntaxError(file, 0, "%TAG", "directives are not read; remove it")
	}
	stream := nodes.NewDecoder(bytes.NewReader(text))
	var tree nodes.Node
	top := &tree
	err = stream.Decode(&tree)
	switch {
	case errors.Is(err, io.EOF): // nothing but comments
	case err != nil:
		return nil, 0, notYAML(file, err)
	default:
		top = tree.Content[0]
	}
	if a := aliasIn(top); a != nil {
		const problem = "aliases are not read; write out what it stands for"
		return nil, 0, syntaxError(file, a.Line, "*"+a.Value, problem)
	}
	if err := checkOneDocument(file, stream); err != nil {
		return nil, 0, err
	}
	if top.Kind == nodes.MappingNode {
		keys = []config.Member{}
		for pair := range slices.Chunk(top.Content, 2) {
			keys = append(keys, config.Member{Key: pair[0].Value, Line: pair[0].Line})
		}
	}
	return keys, max(top.Line, 1), nil
}

// checkOneDocument returns an error if a stream has another document that says something.
func checkOneDocument(file string, stream *nodes.Decoder) error {
	for {
		var next nodes.Node
		err := stream.Decode(&next)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil || next.Content[0].ShortTag() != "!!null" {
			const remedy = "join them, or write one file for each"
			return syntaxError(file, next.Line, "", "is another document; "+remedy)
		}
	}
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
