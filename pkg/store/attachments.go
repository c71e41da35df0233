// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Attachment is an interface of a container in a network.
type Attachment struct {
	ContainerID, IfName string
}

func (a Attachment) file() string { return hashName("attachment", a.ContainerID, a.IfName) }

// network opens the directory of a network's attachments in this boot.
func (d *Dir) network(name string, create bool) (*folder, error) {
	boot, err := d.boot()
	if err != nil {
		return nil, err
	}
	return d.descend(create, attachmentsDir, boot, hashName("network", name))
}

// Attach records that a container has an interface in a network. It takes no lock and syncs nothing:
// attachments are valid in this boot only. It may be called twice.
func (d *Dir) Attach(network, containerID, ifname string) error {
	const attempts = 100
	var err error
	for range attempts { // a directory can be removed before it is used
		var f *folder
		if f, err = d.network(network, true); err == nil {
			var file *os.File
			name := Attachment{containerID, ifname}.file()
			if file, err = f.openOrCreate("write attachment", name, unix.O_RDONLY); err == nil {
				err = file.Close()
			}
			f.close()
		}
		if !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return err
}

// Detach removes an attachment of this boot. It is no error if there is none, and creates nothing.
func (d *Dir) Detach(network, containerID, ifname string) error {
	f, err := d.network(network, false)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	return f.remove(Attachment{containerID, ifname}.file())
}

// Attachments returns the number of the network's attachments in this boot, and when it last changed:
// the mtime of their directory, or the zero Time if there was none in this boot.
func (d *Dir) Attachments(network string) (n int, changed time.Time, err error) {
	f, err := d.network(network, false)
	if err != nil {
		return 0, time.Time{}, ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	names, err := f.names()
	if err == nil {
		changed, err = f.changed()
	}
	return len(names), changed, ignoring(err, os.ErrNotExist) // it may have been removed since it was opened
}

// Prune removes the network's attachments of this boot except those to keep, and creates nothing.
func (d *Dir) Prune(network string, keep []Attachment) error {
	f, err := d.network(network, false)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	kept := make([]string, len(keep))
	for i, a := range keep {
		kept[i] = a.file()
	}
	return ignoring(f.clear(inNetwork, kept...), os.ErrNotExist) // it may have been removed since it was opened
}
