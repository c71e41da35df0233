// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Files is the policy of the node's agent files, together with the policy in the reconciler's own settings. Both are
// one source.
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

// Read reads the files of a directory whose names begin with ip-masq and do not end in "~". If
// dir is "" or does not exist, the reconciler's own policy is the source. An error is a
// config.DocumentError with every mistake in the files, or about the directory.
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
		if doc.resync > 0 && (a.ResyncInterval == 0 || doc.resync < a.ResyncInterval) {
			a.ResyncInterval = doc.resync
		}
	}
	if len(mistakes) > 0 {
		a.ResyncInterval = 0
		return a, &config.DocumentError{Mistakes: mistakes}
	}
	a.Source = source
	return a, nil
}

// merge makes one source of the documents, and returns all mistakes in them or, if there
// is none, the conflicts between them.
func merge(docs []*document) (s policy.Source, mistakes []error) {
	s.ID = policy.SourceID{Kind: policy.AgentFiles}
	s.Policy.Chain = policy.DefaultChain
	ipv6 := slices.ContainsFunc(docs, (*document).mayEnableIPv6)
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
		d, other := byFile[c.Superseded.File], byFile[c.InForce.File]
		with, index := c.InForceValue, other.indexOf(c.InForce)
		if c.InForce.Key != c.Superseded.Key {
			with = fmt.Sprintf("%s[%d]", c.InForce.Key, index)
		}
		mistakes = append(mistakes, d.conflict(c.Superseded.Key, d.indexOf(c.Superseded), c.SupersededValue+" conflicts with "+with, other))
	}
	return s, mistakes
}

func (d *document) conflict(key string, index int, problem string, other *document) error {
	remedy := "write the same in both, or leave it out of one"
	if index >= 0 {
		remedy = "remove one of the two"
	}
	return d.Locate(d.Line(key, index), &policy.FieldError{
		Key: key, Index: index, Problem: fmt.Sprintf("%s in %s; %s", problem, policy.Printable(other.File), remedy),
	})
}

// indexOf returns the index of an item in the document, which may repeat items.
func (d *document) indexOf(o policy.Origin) int {
	if indexes := d.Positions[o.Key].Indexes; o.Index >= 0 && o.Index < len(indexes) {
		return indexes[o.Index]
	}
	return o.Index
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

// readDir returns the agent files of a directory by name, and whether it has other files.
// It reads until nothing changes meanwhile.
func readDir(dir string) (files []file, others bool, err error) {
	const attempts = 1000
	for range attempts {
		if files, others, err = readDirOnce(dir); !errors.Is(err, errChanged) {
			break
		}
	}
	return files, others, err
}

func readDirOnce(dir string) (files []file, others bool, err error) {
	link, from := filepath.Join(dir, configMapData), dir
	version, _ := os.Readlink(link) // none in a directory that is no ConfigMap
	switch {
	case filepath.IsAbs(version):
		from = version
	case version != "":
		from = filepath.Join(dir, version)
	}
	entries, err := os.ReadDir(from)
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		return nil, false, errors.New("not a directory; name the directory that holds the files")
	case errors.Is(err, fs.ErrNotExist) && from != dir: // the kubelet has removed the version
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
		f := file{name: name, path: filepath.Join(dir, name)}
		if f.text, f.err = read(filepath.Join(from, name)); errors.Is(f.err, errChanged) {
			return nil, false, errChanged
		}
		files = append(files, f)
	}
	// The kubelet removes the files of a version, one after another, once the link leads to the next.
	if now, _ := os.Readlink(link); now != version {
		return nil, false, errChanged
	}
	return files, others, nil
}

func read(path string) ([]byte, error) {
	const maxSize = 1 << 20
	text, _, err := safefile.ReadFile(path, maxSize)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errChanged // it was in the directory, and may be there again
	case err != nil:
		return nil, fmt.Errorf("%w; fix it, remove it, or give it a name that does not begin with %s", err, filePrefix)
	}
	return text, nil
}
