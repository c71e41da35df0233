// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/document"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// AgentFiles is what the agents' files of a node say, with what the reconciler's
// own policy adds: together they are one source.
type AgentFiles struct {
	Dir     string
	Missing bool     // there is no such directory
	Files   []string // the names of those that were read, sorted

	// Source is what all of them state. Its Places tell in which file
	// each value stands, by the path in Dir, or OwnPolicy. After an error it
	// has its Source alone.
	Source policy.Source

	// ResyncInterval is the shortest that a file states; 0 where none does.
	ResyncInterval time.Duration

	// Warnings are about what has no effect, or perhaps not the intended one.
	// The same files have the same warnings, in the same words and order.
	Warnings []error
}

// ReadAgentFiles reads the files of a directory whose names begin with ip-masq,
// but for those that end in "~", and unites them with the reconciler's own
// policy. No directory ("") and one that is missing leave that alone.
//
// Of a mounted ConfigMap all files are of one version. A file that cannot be
// read is a mistake like those that are in files, and the error is a
// DocumentError with all there are. Any other error is about the directory.
func ReadAgentFiles(decode document.Decoder, dir string, d Dialect, own AgentPolicy) (AgentFiles, error) {
	a := AgentFiles{Dir: dir, Source: policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}}}
	u := agentUnion{docs: []*agentDoc{own.document()}}
	if dir != "" {
		read, err := readAgentDir(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			a.Missing = true
		case err != nil:
			return a, fmt.Errorf("read the agent files in %s: %w", policy.Printable(dir), err)
		case len(read.files) == 0 && read.holdsOthers:
			a.Warnings = append(a.Warnings, fmt.Errorf("%s holds files, but none whose name begins with %s; rename those that are meant", policy.Printable(dir), agentFilePrefix))
		}
		for _, file := range read.files {
			u.docs = append(u.docs, file.parse(d, decode))
			if file.err == nil {
				a.Files = append(a.Files, file.name)
			}
		}
	}
	mistakes := u.unite()
	for _, doc := range u.docs {
		a.Warnings = append(a.Warnings, doc.warnings...)
	}
	if len(mistakes) > 0 {
		return a, &DocumentError{Mistakes: mistakes}
	}
	a.Source.Policy = u.statement
	if len(u.places) > 0 {
		a.Source.Places = u.places
	}
	a.ResyncInterval = u.interval()
	return a, nil
}

// parse reads the document that the file holds, or says why it cannot be read.
func (f agentFile) parse(d Dialect, decode document.Decoder) *agentDoc {
	if f.err != nil {
		// The message has the path already.
		return &agentDoc{Document: Document{Mistakes: []error{f.err}}, unread: true}
	}
	return parseAgentDoc(f.path, f.doc, d, decode)
}
